"""State of the search between two rounds: the table of measurements, the incumbent, decisions.

Quality depends neither on the link nor, hardly, on how a model is sharded, so the perplexity of one
strategy says something of every other with the same numerics. Searches on other links or ranks
share the table; steps and failures count on their own link and ranks alone.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple, Self

from shardlab.choose.records import Decision
from shardlab.choose.settings import Agent
from shardlab.core.document import Document
from shardlab.core.errors import UserError, nearest
from shardlab.core.link import LOOPBACK
from shardlab.core.numbers import plural
from shardlab.results.files import AnyResult
from shardlab.results.interval import Ratio, paired_ratio
from shardlab.results.result import only
from shardlab.results.table import SearchWorkload, StrategyResults, measured
from shardlab.results.timing_result import TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.strategy.compression import gradient_words, weight_words
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.sync import ENOUGH_EXCHANGES
from shardlab.train.settings import Train


class Numerics(NamedTuple):
    """Settings of a canonical strategy that its losses depend on: codecs, types, and how
    replicas synchronise."""

    gradients: str
    """codec with its options; empty: none"""
    weights: str
    types: str
    """of computation, reduction and stored moments"""
    flat: bool
    """codecs see flat vectors of whole units, and not single parameters"""
    sync: str = ""
    """synchronisation of parameters between replicas that train apart, and how many there are;
    empty: the gradients of every step are reduced"""

    @classmethod
    def of(cls, strategy: CanonicalStrategy) -> "Numerics":
        """Return the numerics of a strategy; equal where only sharding and schedule differ."""
        plain, weights = strategy.gradients.plain(), strategy.weights
        gradients = "" if plain else ", ".join(gradient_words(strategy.gradients))
        narrow = [unit.param_dtype for unit in strategy.overrides if unit.param_dtype]
        types = strategy.param_dtype, strategy.reduce_dtype, strategy.moment_dtype, *narrow
        coded = weight_words(weights) if weights else ""
        flat = bool(gradients or coded) and strategy.traits.flat_gradients
        sync = ""
        if strategy.sync is not None:
            replicas = strategy.replicas or "all ranks"
            sync = f"{strategy.sync.model_dump_json()} between {replicas}"
        return cls(gradients, coded, " ".join(types), flat, sync)

    def includes(self, other: "Numerics") -> bool:
        """Return whether the other has some or all codecs of this one, on any vectors."""
        return (
            (other.types, other.sync) == (self.types, self.sync)
            and bool(other.gradients or other.weights)
            and other.gradients in ("", self.gradients)
            and other.weights in ("", self.weights)
        )


class PerplexityRatio(NamedTuple):
    """Perplexity of a strategy over that of the start; infinite for what diverged."""

    ratio: float
    source: str
    sure: bool = True
    """of the same numerics; otherwise its codecs saw other vectors, or were not all there, or other
    numbers of replicas trained apart, or synchronised less than `ENOUGH_EXCHANGES` times"""
    lossless: bool = False
    """whether it computes what the start computes"""

    @property
    def perplexity(self) -> Ratio:
        """The ratio without an interval over seeds, of which a search trains few."""
        return Ratio(self.ratio, self.ratio, self.ratio)


class History(Document):
    """Everything that the search knows between two rounds."""

    search: str = ""
    """its name; empty for the one without a name"""
    workload: SearchWorkload
    start: str
    """hash of the strategy that the search started from: the reference for steps and quality"""
    incumbent: str
    """hash of the strategy that is held"""
    results: list[AnyResult]
    """all measurements: of the matrix, its timings, and the rounds"""
    rounds: list[Decision] = []
    """of all searches"""

    @cached_property
    def measured(self) -> dict[str, StrategyResults]:
        """The table of measurements, by hash of the strategy: steps are over the start's."""
        return measured(self.results, self.start)

    def with_results(self, results: Iterable[AnyResult]) -> Self:
        """Return the history with further results."""
        changed = self.model_copy(update={"results": [*self.results, *results]})
        vars(changed).pop("measured", None)  # a copy has the table of the original
        return changed

    @property
    def races(self) -> dict[str, list[TimingResult]]:
        """Runs of the race of each round, by its name."""
        races: dict[str, list[TimingResult]] = {}
        for run in only(self.results, TimingResult):
            if run.kind == "race":
                races.setdefault(run.timing, []).append(run)
        return races

    @property
    def incumbent_results(self) -> StrategyResults:
        """Results of the incumbent."""
        return self.measured[self.incumbent]

    @property
    def start_results(self) -> StrategyResults:
        """Results of the strategy that the search started from."""
        return self.measured[self.start]

    @property
    def own_rounds(self) -> list[Decision]:
        """The rounds of this search since it began, perhaps again after another one."""
        own = takewhile(lambda decision: decision.search == self.search, reversed(self.rounds))
        return [*own][::-1]

    @property
    def tried(self) -> dict[str, StrategyResults]:
        """Strategies that were timed or failed on the link and the ranks of this search."""
        load = self.workload
        return {
            key: row for key, row in self.measured.items() if row.step(load) or row.failure(load)
        }

    @property
    def quality(self) -> Callable[[CanonicalStrategy], PerplexityRatio | None]:
        """A function to the quality of a strategy, which need not have been trained.

        Its own runs count before those with the same numerics. Of what was trained with a part of
        its codecs alone, or with all of them on other vectors, the worst counts, since more codecs
        hardly improve it. None: nothing like it was trained.
        """
        start, load = Numerics.of(self.start_results.strategy), self.workload
        trained = [
            (Numerics.of(row.strategy), row, perplexity_ratio(row, self.start_results))
            for row in self.measured.values()
            if row.trained or row.diverged
        ]

        def quality(strategy: CanonicalStrategy) -> PerplexityRatio | None:
            wanted, key = Numerics.of(strategy), strategy.hash()
            if wanted == start:
                return PerplexityRatio(1.0, "computes what the start computes", lossless=True)
            same = [(row, ratio) for numerics, row, ratio in trained if numerics == wanted]
            own = [(row, ratio) for row, ratio in same if row.hash == key]
            if rows := own or same:
                mean = math.prod(ratio for _, ratio in rows) ** (1 / len(rows))
                sources = ", ".join(row.source for row, _ in rows)
                source = f"{'its own' if own else 'the same numerics'}: {sources}"
                doubt = ""
                if strategy.sync is not None:
                    steps = min((run.steps for row, _ in rows for run in row.trained), default=0)
                    exchanges = strategy.sync.exchanges(steps)
                    if exchanges < ENOUGH_EXCHANGES:
                        doubt = f", after {plural(exchanges, 'synchronisation')}"
                    # of more replicas that train apart each sees fewer samples
                    if load.world_size != load.trained_on:
                        doubt += f", on {load.trained_on} ranks"
                return PerplexityRatio(mean, source + doubt, sure=not doubt)
            alike = [(row, ratio) for numerics, row, ratio in trained if wanted.includes(numerics)]
            if not alike:
                return None
            worst, ratio = max(alike, key=lambda each: each[1])
            return PerplexityRatio(
                ratio, f"its codecs, or a part of them: {worst.source}", sure=False
            )

        return quality


def reason_to_stop(history: History, agent: Agent) -> str | None:
    """Return why no more trials run, or None."""
    if history.workload.world_size == 1:
        return "one rank: there is nothing to shard and nothing to send"
    ran = [decision for decision in history.own_rounds if decision.decision != "none"]
    if len(ran) >= agent.budget:
        return f"the budget of {agent.budget} trials is spent"
    minutes = sum(decision.seconds for decision in history.own_rounds) / 60
    if agent.budget_minutes is not None and minutes >= agent.budget_minutes:
        return f"the budget of {agent.budget_minutes:g} minutes is spent: {minutes:.1f} minutes"
    last = [decision.decision for decision in ran[-agent.stop_loss :]]
    if last == ["reject"] * agent.stop_loss:
        return f"stop-loss: the last {agent.stop_loss} trials were rejected"
    return None


def initial_history(
    records: Iterable[AnyResult],
    timed: Iterable[TimingResult],
    agent: Agent,
    train: Train,
    search: str | None = None,
) -> History:
    """Return the state before the first round: all that was measured of the matrix.

    The start is held: a proposal, which knows the memory limit, replaces it by `hold_best`.

    Args:
        records: of the matrix.
        timed: of all timings; those with other micro-batches than the records do not count.
        agent: settings of the search.
        search: its name, where it has one.

    Raises:
        UserError: no record of `agent.start`, or it diverged or crashed; or records of different
            workloads.
    """
    # two names of one meaning are one strategy: name and figures of the start take precedence
    records = sorted(records, key=lambda record: record.run != agent.start)
    if not records or records[0].run != agent.start:
        runs = {record.run for record in records}
        raise UserError(
            f"agent.start: no record of run {agent.start!r}; {nearest(agent.start, runs)}"
        )
    start = records[0].strategy_hash
    assert start is not None, "a training run has a strategy"
    if failures := measured(records, start)[start].failures:
        raise UserError(
            f"agent.start: run {agent.start!r} failed ({failures[0].detail}): name another run"
        )
    load = _workload(only(records, TrainResult), agent, train)
    return History(
        search=search or "",
        workload=load,
        start=start,
        incumbent=start,
        results=[*records, *(run for run in timed if run.accumulation == load.accumulation)],
    )


def load_history(path: str, results: str, first: History) -> History:
    """Return the state that a round starts from: `first` (the path is `results`), or a history.

    Where that is of another search, this one begins with everything that was measured before, and
    holds the start.

    Raises:
        UserError: there is no such history.
    """
    if path == results:
        return first
    history = History.from_file(path, f"run shardlab decide {Path(path).parent.name}")
    if history.search == first.search:
        return history
    update = {"search": first.search, "workload": first.workload, "incumbent": first.incumbent}
    return history.model_copy(update=update)


def perplexity_ratio(row: StrategyResults, reference: StrategyResults) -> float:
    """Return the perplexity of a strategy that was trained over the reference's."""
    return math.inf if row.diverged else mean_ratio(row.trained, reference.trained)


def mean_ratio(runs: Iterable[TrainResult], others: Iterable[TrainResult]) -> float:
    """Return the geometric mean over seeds of the perplexity over the other's; NaN without one."""
    first, second = ({run.seed: run.val_ppl or math.nan for run in of} for of in (runs, others))
    seeds = [seed for seed in first if seed in second]
    return paired_ratio([first[s] for s in seeds], [second[s] for s in seeds]).ratio


def _workload(records: Sequence[TrainResult], agent: Agent, train: Train) -> SearchWorkload:
    """Return what the records trained, on the link of the search.

    Raises:
        UserError: they are of different workloads.
    """
    names = [name for name in SearchWorkload.model_fields if name in TrainResult.model_fields]
    first, *others = records
    for record in others:
        if any(getattr(record, name) != getattr(first, name) for name in names):
            raise UserError(
                f"results: run {record.run!r} trained another workload than {first.run!r}: collect "
                "the results again"
            )
    link = agent.link or train.link
    own = {
        "link": LOOPBACK if link is None else link.name,
        "world_size": agent.world_size or first.world_size,
        "trained_on": first.world_size,
    }
    return SearchWorkload(**{name: getattr(first, name) for name in names} | own)
