"""State of the search between two rounds: the table of measurements, the incumbent, decisions.

Quality depends neither on the link nor, hardly, on how a model is sharded, so the perplexity of one
strategy says something of every other with the same numerics. Searches on other links or ranks
share the table; steps and failures count on their own link and ranks alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from shardlab.config.compression import gradient_words, weight_words
from shardlab.config.machine import LOOPBACK
from shardlab.config.run_record import Record
from shardlab.config.schema import Agent, Train
from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, Race, TimedRun
from shardlab.core.document import Document
from shardlab.core.errors import UserError, nearest
from shardlab.core.interval import paired_ratio
from shardlab.search.records import (
    Decision,
    Failure,
    Measured,
    StepRatio,
    TrainingRun,
    Workload,
)


class Numerics(NamedTuple):
    """Settings of a canonical strategy that its losses depend on: codecs and types."""

    gradients: str
    """codec with its options; empty: none"""
    weights: str
    types: str
    """of computation, reduction and stored moments"""
    flat: bool
    """codecs see flat vectors of whole units, and not single parameters"""

    @classmethod
    def of(cls, strategy: CanonicalStrategy) -> "Numerics":
        """Return the numerics of a strategy; equal where only sharding and schedule differ."""
        plain, weights = strategy.gradients.plain(), strategy.weights
        gradients = "" if plain else ", ".join(gradient_words(strategy.gradients))
        narrow = [unit.param_dtype for unit in strategy.overrides if unit.param_dtype]
        types = strategy.param_dtype, strategy.reduce_dtype, strategy.moment_dtype, *narrow
        coded = weight_words(weights) if weights else ""
        flat = bool(gradients or coded) and strategy.traits.flat_gradients
        return cls(gradients, coded, " ".join(types), flat)

    def is_alike(self, other: "Numerics") -> bool:
        """Return whether only the vectors differ that codecs see."""
        return self[:3] == other[:3]

    def includes(self, other: "Numerics") -> bool:
        """Return whether the other compresses a part of what this does, in the same way."""
        return (
            other.types == self.types
            and bool(other.gradients or other.weights)
            and other.gradients in ("", self.gradients)
            and other.weights in ("", self.weights)
        )


class Quality(NamedTuple):
    """Perplexity of a strategy over that of the start; infinite for what diverged."""

    ratio: float
    source: str
    sure: bool = True
    """of the same numerics; otherwise its codecs saw other vectors"""

    def is_tolerated(self, tolerance: float) -> bool:
        """Return whether it is known well enough, and low enough."""
        return self.sure and self.ratio <= 1 + tolerance


class History(Document):
    """Everything that the search knows between two rounds."""

    search: str = ""
    """its name; empty for the one without a name"""
    workload: Workload
    start: str
    """hash of the strategy that the search started from: the reference for steps and quality"""
    incumbent: str
    """hash of the strategy that is held"""
    measured: dict[str, Measured]
    """table of measurements, by hash of the strategy"""
    rounds: list[Decision] = []
    """of all searches"""
    races: list[Race] = []
    """of the rounds, for the forecast to be fitted on"""

    @property
    def held(self) -> Measured:
        """The incumbent."""
        return self.measured[self.incumbent]

    @property
    def reference(self) -> Measured:
        """The strategy that the search started from."""
        return self.measured[self.start]

    @property
    def own_rounds(self) -> list[Decision]:
        """The rounds of this search since it began, perhaps again after another one."""
        own = takewhile(lambda decision: decision.search == self.search, reversed(self.rounds))
        return [*own][::-1]

    @property
    def tried(self) -> dict[str, Measured]:
        """Strategies that were timed or failed on the link and the ranks of this search."""
        load = self.workload
        return {
            key: row for key, row in self.measured.items() if row.step(load) or row.failure(load)
        }

    def quality(self, strategy: CanonicalStrategy) -> Quality | None:
        """Return what `qualities` say of one strategy."""
        return self.qualities()(strategy)

    def qualities(self) -> Callable[[CanonicalStrategy], Quality | None]:
        """Return a function to the quality of a strategy, which need not have been trained.

        Its own runs count before those with the same numerics, and these before those whose codecs
        see other vectors. Of what was trained with a part of its codecs alone, the worst counts,
        since more codecs hardly improve it. None: nothing like it was trained.
        """
        start = Numerics.of(self.reference.strategy)
        trained = [
            (Numerics.of(row.strategy), row) for row in self.measured.values() if row.has_quality
        ]
        ratios = {row.hash: perplexity_ratio(row, self.reference) for _, row in trained}

        def quality(strategy: CanonicalStrategy) -> Quality | None:
            wanted, key = Numerics.of(strategy), strategy.hash()
            if wanted == start:
                return Quality(1.0, "computes what the start computes")
            own = [row for _, row in trained if row.hash == key]
            same = [row for numerics, row in trained if numerics == wanted]
            alike = [row for numerics, row in trained if numerics.is_alike(wanted)]
            for rows, what in (own, "its own"), (same, "the same numerics"), (alike, "its codecs"):
                if rows:
                    mean = math.exp(sum(math.log(ratios[row.hash]) for row in rows) / len(rows))
                    sources = ", ".join(row.source for row in rows)
                    return Quality(mean, f"{what}: {sources}", sure=rows is not alike)
            parts = [row for numerics, row in trained if wanted.includes(numerics)]
            worst = max(parts, key=lambda row: ratios[row.hash], default=None)
            if worst is None:
                return None
            source = f"a part of its codecs: {worst.source}"
            return Quality(ratios[worst.hash], source, sure=False)

        return quality

    def peak(self, row: Measured) -> int | None:
        """Return the largest measured peak of a rank, bytes.

        None: it was not trained, or on other ranks than the search has, which changes the peak.
        """
        if self.workload.world_size != self.workload.trained_on:
            return None
        return max((run.memory_peak_bytes for run in row.trained), default=None)

    def fits(self, row: Measured, limit_bytes: int, predicted: Mapping[str, int]) -> bool:
        """Return whether a peak of a rank is within the limit; true where none is known.

        Args:
            predicted: peaks by hash, where none was measured.
        """
        return (self.peak(row) or predicted.get(row.hash, 0)) <= limit_bytes

    def fastest(self, tolerance: float, limit_bytes: int, predicted: Mapping[str, int]) -> Measured:
        """Return the admissible strategy whose steps were measured as the shortest.

        Admissible: it did not fail, runs with the same numerics say that its perplexity is
        tolerated, and it fits. The start, where none is.

        Args:
            limit_bytes, predicted: of `fits`.
        """
        ratios, quality = {}, self.qualities()
        for row in self.measured.values():
            step, known = row.step(self.workload), quality(row.strategy)
            admissible = known is not None and known.is_tolerated(tolerance)
            admissible &= row.failure(self.workload) is None
            if step and admissible and self.fits(row, limit_bytes, predicted):
                ratios[row.hash] = step.ratio
        return self.measured[min(ratios, key=lambda key: ratios[key], default=self.start)]


def memory_limit(agent: Agent, workload: Workload) -> int:
    """Return the bytes that one rank may use: of the parameters (1 GB = 10^9 B), or its part of the
    machine's."""
    if agent.memory_limit_gb is not None:
        return int(agent.memory_limit_gb * 1e9)
    return workload.memory_bytes


def hold_fastest(history: History, agent: Agent, predicted: Mapping[str, int]) -> History:
    """Return the history with the fastest admissible strategy held, if its search has no round.

    The first race has to confirm it.

    Args:
        predicted: peaks by hash of what has none measured, bytes of a rank.
    """
    if history.own_rounds:
        return history
    limit = memory_limit(agent, history.workload)
    best = history.fastest(agent.quality_tolerance, limit, predicted)
    return history.model_copy(update={"incumbent": best.hash})


def initial_history(
    records: Sequence[Record],
    timed: Iterable[TimedRun],
    agent: Agent,
    train: Train,
    search: str | None = None,
) -> History:
    """Return the state before the first round: all that was measured of the matrix.

    The start is held: a proposal, which knows the memory limit, replaces it by `hold_fastest`.

    Args:
        records: of the matrix.
        timed: of all timings.
        agent: settings of the search.
        search: its name, where it has one.

    Raises:
        UserError: no record of `agent.start`, or it diverged.
    """
    workload = _workload(records, agent, train)
    runs: dict[str, list[Record]] = {}
    for record in records:
        runs.setdefault(record.run, []).append(record)
    if agent.start not in runs:
        raise UserError(
            f"agent.start: no record of run {agent.start!r}; {nearest(agent.start, runs)}"
        )
    # two names of one meaning are one strategy: name and figures of the start take precedence
    measured: dict[str, Measured] = {}
    for run in (agent.start, *runs):
        row = _row_of_run(run, runs[run])
        measured.setdefault(row.hash, row)
    start = next(iter(measured.values()))
    if start.diverged:
        raise UserError(
            f"agent.start: run {agent.start!r} diverged ({start.failures[0].detail}): name another "
            "run"
        )
    for row in _rows_of_timings(timed, start.hash):
        known = measured.get(row.hash)
        steps = [*known.steps, *row.steps] if known else row.steps
        measured[row.hash] = (known or row).model_copy(update={"steps": steps})
    return History(
        search=search or "",
        workload=workload,
        start=start.hash,
        incumbent=start.hash,
        measured=measured,
    )


def load_history(path: str, results: str, first: History) -> History:
    """Return the state that a round starts from: `first` (the path is `results`), or a history.

    Where that is of another search, this one begins with everything that was measured before, and
    holds the start.

    Raises:
        UserError: the earlier history lacks something of the first, so it is out of date.
    """
    if path == results:
        return first
    history = History.from_file(path, f"run python -m stages.decide {Path(path).parent.name}")
    for key, row in first.measured.items():
        if key not in history.measured:
            raise UserError(
                f"{path}: knows nothing of {row.source} in {results}: repeat the earlier rounds"
            )
    if history.search == first.search:
        return history
    update = {"search": first.search, "workload": first.workload, "incumbent": first.incumbent}
    return history.model_copy(update=update)


def perplexity_ratio(row: Measured, reference: Measured) -> float:
    """Return the perplexity of a strategy that was trained over the reference's."""
    return math.inf if row.diverged else mean_ratio(row.trained, reference.trained)


def mean_ratio(runs: Iterable[TrainingRun], others: Iterable[TrainingRun]) -> float:
    """Return the geometric mean over seeds of the perplexity over the other's; NaN without one."""
    known = {run.seed: run.val_ppl for run in others}
    logs = [math.log(run.val_ppl / known[run.seed]) for run in runs if run.seed in known]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def paired_steps(
    step_ms: Sequence[float], others: Sequence[float], source: str, link: str, world_size: int
) -> StepRatio:
    """Return the ratio of interleaved steps over others, over the repetitions that both have."""
    count = min(len(step_ms), len(others))
    ratio = paired_ratio(step_ms[:count], others[:count])
    where = {"source": source, "link": link, "world_size": world_size}
    return StepRatio.model_validate({**where, **ratio._asdict(), "repetitions": count})


def _row_of_run(run: str, records: list[Record]) -> Measured:
    strategy = parse_strategy(records[0].strategy, f"strategy of run {run}")
    records = sorted(records, key=lambda record: record.seed)
    source = f"run {run}"
    failures = [
        Failure(
            source=source,
            link=record.link,
            world_size=record.world_size,
            outcome="diverged",
            detail=f"seed {record.seed}: {record.divergence}",
        )
        for record in records
        if record.divergence
    ]
    return Measured(
        strategy=strategy.canonical(),
        hash=strategy.hash(),
        source=source,
        trained=[] if failures else [TrainingRun.of(record) for record in records],
        failures=failures,
    )


def _rows_of_timings(timed: Iterable[TimedRun], start: str) -> list[Measured]:
    """Return the steps of every strategy that was timed together with the start."""
    timings: dict[str, list[TimedRun]] = {}
    for run in timed:
        timings.setdefault(run.timing, []).append(run)
    rows = []
    for name, runs in timings.items():
        reference = next((run for run in runs if run.strategy_hash == start), None)
        for run in runs:
            if reference is None or run.run == NO_COMMUNICATION:
                continue
            strategy = parse_strategy(run.strategy, f"strategy of {run.run} in timing {name}")
            source = f"timing {name}"
            where = source, run.link, run.world_size
            steps = paired_steps(run.step_ms, reference.step_ms, *where)
            rows.append(
                Measured(
                    strategy=strategy.canonical(),
                    hash=strategy.hash(),
                    source=source,
                    steps=[steps],
                )
            )
    return rows


def _workload(records: Sequence[Record], agent: Agent, train: Train) -> Workload:
    """Return what the records trained, on the link of the search.

    Raises:
        UserError: there are none, or they are of different workloads.
    """
    if not records:
        raise UserError("results: no record: train the matrix first")
    names = [name for name in Workload.model_fields if name in Record.model_fields]
    for record in records:
        for name in names:
            if getattr(record, name) != getattr(records[0], name):
                raise UserError(
                    f"results: run {record.run!r} trained another workload than "
                    f"{records[0].run!r}: collect the results again"
                )
    link, trained_on = agent.link or train.link, records[0].world_size
    ranks = agent.world_size or trained_on
    own = {
        "link": LOOPBACK if link is None else link.name,
        "world_size": ranks,
        "trained_on": trained_on,
        "memory_bytes": records[0].host["memory_bytes"] // ranks,
    }
    return Workload(**{name: getattr(records[0], name) for name in names} | own)
