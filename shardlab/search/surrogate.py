"""Predictions of strategies: step by the forecast, memory by formula, quality by runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardlab.config.calibration_record import Calibration
from shardlab.config.schema import Train
from shardlab.config.search import Agent
from shardlab.config.strategy import CanonicalStrategy
from shardlab.config.timing_record import TimedRun
from shardlab.forecast.machine import fit_machine
from shardlab.forecast.model import Model, Workload, fit_model, strategy_of, unpredictable
from shardlab.search.feasible import Feasible, Shapes
from shardlab.search.history import History
from shardlab.search.rounds import Prediction


class Ranked(NamedTuple):
    """A feasible strategy with its predicted step; None where the model cannot predict it."""

    feasible: Feasible
    seconds: float | None


def fit(calibration: Calibration, known: Sequence[TimedRun], raced: Iterable[TimedRun]) -> Model:
    """Return the model fitted on timings and on what earlier races timed, as far as it covers
    these.

    Raises:
        UserError: the calibration or the timings lack something.
    """
    machine = fit_machine(calibration)
    covered = [
        run for run in raced if run.strategy is None or not unpredictable(strategy_of(run), machine)
    ]
    return fit_model(machine, [*known, *covered])


def workload_of(
    history: History, agent: Agent, train: Train, timed: Iterable[TimedRun]
) -> Workload:
    """Return ranks and link of the search.

    Args:
        timed: any timings; those with a link say how it is emulated here.
    """
    link, load = agent.link or train.link, history.workload
    emulations = (run.link_emulation for run in timed if run.bits_per_second is not None)
    return Workload(
        world_size=load.world_size,
        parameters=load.parameters,
        accumulation=load.accumulation,
        threads=train.threads,
        bits_per_second=link.bits_per_second if link else None,
        delay_s=link.delay_ms / 1e3 if link else 0.0,
        link_emulation=next(emulations, "namespaces") if link else "none",
    )


def _order(each: Ranked) -> tuple[Any, ...]:
    # of ties first what compresses less, then by hash: the same list in every run
    weights = each.feasible.strategy.weights is not None
    return each.seconds is None, each.seconds, weights, each.feasible.hash


class Surrogate:
    """Predicts strategies in place of measuring them.

    Args:
        model: fitted on timings, those of earlier races included.
        workload: ranks and link of the search.
    """

    def __init__(self, model: Model, workload: Workload, shapes: Shapes, history: History) -> None:
        self._model, self._workload, self._shapes = model, workload, shapes
        self._history = history

    def rank(self, found: Iterable[Feasible], unpredicted: Counter[str]) -> list[Ranked]:
        """Predict steps without intervals, the shortest first; those without prediction last.

        Args:
            unpredicted: how many could not be predicted, by reason.
        """
        ranked = []
        for each in found:
            why = self.obstacle(each.strategy)
            unpredicted.update([why] if why else [])
            ranked.append(Ranked(each, None if why else self.seconds(each.strategy)))
        return sorted(ranked, key=_order)

    def obstacle(self, strategy: CanonicalStrategy) -> str | None:
        """Return why the step of a strategy cannot be predicted, or None if it can."""
        return self._model.obstacle(strategy)

    def seconds(self, strategy: CanonicalStrategy) -> float:
        """Predict the step of a strategy without obstacle."""
        return self._model.predict(strategy, self._shapes.units(strategy), self._workload)

    def predict(self, found: Feasible) -> Prediction:
        """Predict everything of a strategy, with the interval of its step."""
        strategy = found.strategy
        quality = self._history.quality(strategy)
        why = self.obstacle(strategy)
        step = None
        if why is None:
            units = self._shapes.units(strategy)
            step = self._model.estimate(strategy, units, self._workload)
        known = quality is not None and quality.ratio < float("inf")
        return Prediction(
            step_ms=step and 1e3 * step.value,
            low_ms=step and 1e3 * step.low,
            high_ms=step and 1e3 * step.high,
            memory_bytes=found.memory_bytes,
            perplexity_ratio=quality.ratio if quality and known else None,
            note=why or (quality.source if quality else "its codecs were never trained with"),
        )
