"""State of the search between two rounds: the table of measurements, the incumbent, decisions.

Quality does not depend on the link, and hardly on how a model is sharded. So the perplexity of one
strategy predicts the perplexity of every strategy with the same numerics. Searches on several links
or numbers of ranks share the table; a step or a failure counts only on the link and the ranks on
which it was measured.
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
from shardlab.results.table import SearchWorkload, StrategyResults, results_by_strategy
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
    """Codec with its options; empty: none."""
    weights: str
    types: str
    """Dtypes of computation, reduction and stored moments."""
    flat: bool
    """Whether codecs see flat vectors of whole units in place of single parameters."""
    sync: str = ""
    """Synchronisation of parameters, with the number of replicas; empty: the gradients of every
    step are reduced."""

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
        """Return whether the other has some or all of these codecs, on any vectors."""
        return (
            (other.types, other.sync) == (self.types, self.sync)
            and bool(other.gradients or other.weights)
            and other.gradients in ("", self.gradients)
            and other.weights in ("", self.weights)
        )


class PerplexityRatio(NamedTuple):
    """Perplexity of a strategy over the start's; infinite where the strategy diverged."""

    ratio: float
    source: str
    sure: bool = True
    """Whether it was measured with the same numerics. Otherwise the codecs saw other vectors, some
    codecs were missing, the number of replicas with `sync` was another one, or they synchronised
    fewer than `ENOUGH_EXCHANGES` times."""
    lossless: bool = False
    """Whether the strategy computes what the start computes."""

    @property
    def perplexity(self) -> Ratio:
        """The ratio without an interval over seeds, of which a search trains few."""
        return Ratio(self.ratio, self.ratio, self.ratio)


class History(Document):
    """Everything that the search knows between two rounds."""

    search: str = ""
    """Name of the search; empty for the search without a name."""
    workload: SearchWorkload
    start: str
    """Hash of the strategy that the search started from: the baseline of steps and quality."""
    incumbent: str
    """Hash of the best strategy so far."""
    results: list[AnyResult]
    """All measurements of the matrix, its timings and the rounds."""
    rounds: list[Decision] = []
    """Decisions of all searches."""

    @cached_property
    def measured(self) -> dict[str, StrategyResults]:
        """The table of measurements, by hash of the strategy; steps are over the start's."""
        return results_by_strategy(self.results, self.start)

    def with_results(self, results: Iterable[AnyResult]) -> Self:
        """Return the history with further results."""
        history = self.model_copy(update={"results": [*self.results, *results]})
        vars(history).pop("measured", None)  # the copy would keep the cached table of the original
        return history

    @property
    def races(self) -> dict[str, list[TimingResult]]:
        """Runs of the race of each round, by name of the round."""
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
    def search_rounds(self) -> list[Decision]:
        """The rounds of this search since it began, perhaps again after another one."""
        latest = takewhile(lambda decision: decision.search == self.search, reversed(self.rounds))
        return [*latest][::-1]

    @property
    def tried(self) -> dict[str, StrategyResults]:
        """Strategies that were timed or failed on the link and the ranks of this search."""
        load = self.workload
        return {
            key: row for key, row in self.measured.items() if row.step(load) or row.failure(load)
        }

    @property
    def quality(self) -> Callable[[CanonicalStrategy], PerplexityRatio | None]:
        """A function that returns the quality of a strategy, which need not have been trained.

        Training runs of the strategy count first, then training runs with the same numerics.
        Without both, the worst quality counts of all strategies that were trained with some of its
        codecs, or with all of them on other vectors: further codecs hardly improve quality. None:
        nothing similar was trained.
        """
        start, load = Numerics.of(self.start_results.strategy), self.workload
        trained = [
            (Numerics.of(row.strategy), row, perplexity_ratio(row, self.start_results))
            for row in self.measured.values()
            if row.trained or row.diverged
        ]

        def quality(strategy: CanonicalStrategy) -> PerplexityRatio | None:
            numerics, key = Numerics.of(strategy), strategy.hash()
            if numerics == start:
                return PerplexityRatio(1.0, "computes what the start computes", lossless=True)
            equal = [(row, ratio) for other, row, ratio in trained if other == numerics]
            of_strategy = [(row, ratio) for row, ratio in equal if row.hash == key]
            if rows := of_strategy or equal:
                mean = math.prod(ratio for _, ratio in rows) ** (1 / len(rows))
                sources = ", ".join(row.source for row, _ in rows)
                source = f"{'its own' if of_strategy else 'the same numerics'}: {sources}"
                doubt = ""
                if strategy.sync is not None:
                    steps = min((run.steps for row, _ in rows for run in row.trained), default=0)
                    exchanges = strategy.sync.exchanges(steps)
                    if exchanges < ENOUGH_EXCHANGES:
                        doubt = f", after {plural(exchanges, 'synchronisation')}"
                    # with more replicas, each sees fewer samples between synchronisations
                    if load.world_size != load.trained_on:
                        doubt += f", on {load.trained_on} ranks"
                return PerplexityRatio(mean, source + doubt, sure=not doubt)
            partial = [(row, ratio) for other, row, ratio in trained if numerics.includes(other)]
            if not partial:
                return None
            worst, ratio = max(partial, key=lambda row_and_ratio: row_and_ratio[1])
            return PerplexityRatio(
                ratio, f"its codecs, or a part of them: {worst.source}", sure=False
            )

        return quality


def reason_to_stop(history: History, agent: Agent) -> str | None:
    """Return why no more trials run, or None."""
    if history.workload.world_size == 1:
        return "one rank: there is nothing to shard and nothing to send"
    ran = [decision for decision in history.search_rounds if decision.decision != "none"]
    if len(ran) >= agent.budget:
        return f"the budget of {agent.budget} trials is spent"
    minutes = sum(decision.seconds for decision in history.search_rounds) / 60
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
    """Return the state before the first round: all measurements of the matrix.

    The incumbent is the start. A proposal, which knows the memory limit, replaces it by
    `with_best_incumbent`.

    Args:
        records: results of the matrix.
        timed: results of all timings; timings with other micro-batches than the records are left
            out.
        agent: settings of the search.
        search: name of the search, where it has one.

    Raises:
        UserError: there is no record of `agent.start`, or it diverged or crashed, or the records
            are of different workloads.
    """
    # two names may stand for one strategy: name and figures of the start take precedence
    records = sorted(records, key=lambda record: record.run != agent.start)
    if not records or records[0].run != agent.start:
        runs = {record.run for record in records}
        raise UserError(
            f"agent.start: no record of run {agent.start!r}; {nearest(agent.start, runs)}"
        )
    start = records[0].strategy_hash
    assert start is not None, "a training run has a strategy"
    if failures := results_by_strategy(records, start)[start].failures:
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
    """Return the state that a round starts from: `first` where the path is `results`, otherwise the
    history at the path.

    Where that history is of another search, this search begins with all of its measurements, and
    with the start as incumbent.

    Raises:
        UserError: there is no history at the path.
    """
    if path == results:
        return first
    history = History.from_file(path, f"run shardlab decide {Path(path).parent.name}")
    if history.search == first.search:
        return history
    update = {"search": first.search, "workload": first.workload, "incumbent": first.incumbent}
    return history.model_copy(update=update)


def perplexity_ratio(row: StrategyResults, baseline: StrategyResults) -> float:
    """Return the perplexity of a trained strategy over the baseline's."""
    return math.inf if row.diverged else mean_ratio(row.trained, baseline.trained)


def mean_ratio(runs: Iterable[TrainResult], baseline: Iterable[TrainResult]) -> float:
    """Return the geometric mean over seeds of the perplexity over the baseline's; NaN where they
    share no seed."""
    by_seed = {run.seed: run.val_ppl or math.nan for run in runs}
    of_baseline = {run.seed: run.val_ppl or math.nan for run in baseline}
    seeds = [seed for seed in by_seed if seed in of_baseline]
    return paired_ratio([by_seed[s] for s in seeds], [of_baseline[s] for s in seeds]).ratio


def _workload(records: Sequence[TrainResult], agent: Agent, train: Train) -> SearchWorkload:
    """Return the workload of the records, on the link and the ranks of the search.

    Raises:
        UserError: the records are of different workloads.
    """
    names = [name for name in SearchWorkload.model_fields if name in TrainResult.model_fields]
    first, *later = records
    for record in later:
        if any(getattr(record, name) != getattr(first, name) for name in names):
            raise UserError(
                f"results: run {record.run!r} trained another workload than {first.run!r}: collect "
                "the results again"
            )
    link = agent.link or train.link
    of_search = {
        "link": LOOPBACK if link is None else link.name,
        "world_size": agent.world_size or first.world_size,
        "trained_on": first.world_size,
    }
    return SearchWorkload(**{name: getattr(first, name) for name in names} | of_search)
