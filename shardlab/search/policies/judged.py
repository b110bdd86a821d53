"""Policies that predict: the forecast alone, and searches in which a judge chooses."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardlab.config.calibration_record import Calibration
from shardlab.config.schema import Space
from shardlab.config.search import Agent
from shardlab.config.timing_record import TimedRun
from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.forecast.workload import workload_of
from shardlab.search.feasible import Feasible, Shapes
from shardlab.search.history import History, Measured, paired_steps
from shardlab.search.judge import Judge
from shardlab.search.policies.policy import Choice, Known, ListPolicy, Policy
from shardlab.search.policies.replay import Table
from shardlab.search.proposal import Proposer
from shardlab.search.surrogate import Surrogate, fit


class Search(NamedTuple):
    """Everything that a search knows of a workload before it measures on it."""

    first: History
    """of the matrix, which gives quality; the start is held and no strategy has steps"""
    agent: Agent
    shapes: Shapes
    calibration: Calibration
    fitted: Sequence[TimedRun]
    """that the forecast is fitted on: none of the table's"""

    def surrogate(
        self, table: Table, history: History, measured: Sequence[TimedRun] = ()
    ) -> Surrogate:
        """Return predictions fitted on the given timings and on what was measured."""
        model = fit(self.calibration, self.fitted, measured)
        return Surrogate(model, workload_of(table.alone), self.shapes, history)

    def history(self, table: Table, known: Known) -> History:
        """Return the history of a search that has measured so much; the fastest is held."""
        measured, start = dict(self.first.measured), known.step_ms[table.start]
        for key, steps in known.step_ms.items():
            entry = measured.get(key) or Measured(
                strategy=table.strategies[key], hash=key, source=f"timing {table.name}"
            )
            ratio = paired_steps(steps, start, f"timing {table.name}")
            measured[key] = entry.model_copy(update={"steps": [ratio]})
        workload = self.first.workload.model_copy(
            update={"world_size": table.alone.world_size, "link": table.alone.link}
        )
        updated = {"workload": workload, "measured": measured, "incumbent": known.best}
        return self.first.model_copy(update=updated)

    def proposer(self, table: Table, known: Known) -> Proposer:
        """Return the proposer of the next round, which offers strategies of the table."""
        history, measured = self.history(table, known), []
        if len(known.step_ms) > 1:  # a search races the start together with its first choice
            measured = [
                table.runs[key].model_copy(update={"step_ms": steps})
                for key, steps in known.step_ms.items()
            ]
            measured.append(table.alone.model_copy(update={"step_ms": known.alone_ms}))
        surrogate = self.surrogate(table, history, measured)
        offered = [*table.strategies.values()]
        return Proposer(history, self.agent, Space(), self.shapes, surrogate, offered=offered)


class JudgedPolicy(Policy):
    """A search whose judge chooses from the shortlist of a forecast fitted on all measurements."""

    def __init__(self, name: str, judge: Judge, propose: Callable[[Known], Proposer]) -> None:
        self.name, self._judge, self._propose = name, judge, propose

    def choose(self, known: Known) -> Choice:  # noqa: D102
        proposer = self._propose(known)
        try:
            made = proposer.propose(len(known.step_ms), self._judge)
        except UserError as error:  # of one answer, which the other replays do not need
            say(f"{self.name}: {error}")
            return Choice(None, infeasible=1)
        chosen = {each.id: each.strategy for each in made.candidates}.get(made.verdict.choice or "")
        return Choice(
            chosen.hash() if chosen else None,
            infeasible=int(made.verdict.fault == "answer"),
            flips=int(made.verdict.fault == "order"),
        )


def forecast_policy(search: Search, table: Table) -> ListPolicy:
    """Return the policy that measures in the order of the first predictions."""
    found = (Feasible(each, key, 0) for key, each in table.strategies.items())
    ranked = search.surrogate(table, search.first).rank(found, Counter())
    return ListPolicy("forecast", [each.feasible.hash for each in ranked])
