"""State of the search: what was measured of each strategy, the incumbent, and the rounds."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from shardlab.agent.records.numerics import Numerics
from shardlab.agent.records.rounds import Measurement, Outcome, Round, StepRatio
from shardlab.core.document import Document
from shardlab.core.errors import UserError, nearest
from shardlab.core.interval import paired_ratio
from shardlab.experiment.link import LOOPBACK
from shardlab.experiment.schema import Agent, Train
from shardlab.records.race import Race
from shardlab.records.run import Record
from shardlab.records.timing import NO_COMMUNICATION, TimedRun
from shardlab.strategy.strategy import CanonicalStrategy, parse_strategy


class Workload(Document):
    """Workload that every strategy of one search trains."""

    model: str
    parameters: int
    world_size: int
    sequence_length: int
    batch_size: int
    accumulation: int
    link: str
    """of the search; training runs, which give quality, may have another one"""
    memory_bytes: int
    """of the machine, for each of its ranks"""


class Quality(NamedTuple):
    """Perplexity of a strategy over that of the start; infinite for what diverged."""

    ratio: float
    source: str
    sure: bool = True
    """of the same numerics; otherwise its codecs saw other vectors"""

    def tolerated(self, tolerance: float) -> bool:
        """Return whether it is known well enough, and low enough."""
        return self.sure and self.ratio <= 1 + tolerance


class Measured(Document):
    """Measurements of a strategy."""

    strategy: CanonicalStrategy
    hash: str
    source: str
    """where it was first measured: `run NAME`, `timing NAME` or `round K`"""
    outcome: Outcome = "ok"
    detail: str = ""
    measurements: list[Measurement] = []
    """of training runs, by seed"""
    steps: list[StepRatio] = []
    """over the start's, on the link of the search, the latest last"""

    def mean(self, field: str) -> float:
        """Return the mean of a measurement's field over the seeds that were trained."""
        values: list[float] = [getattr(each, field) for each in self.measurements]
        return sum(values) / len(values)


class History(Document):
    """Everything that the search knows between two rounds."""

    workload: Workload
    start: str
    """hash of the strategy that the search started from: the reference for steps and quality"""
    incumbent: str
    """hash of the strategy that is held"""
    measured: dict[str, Measured]
    """by hash of the strategy"""
    rounds: list[Round] = []
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

    def quality(self, strategy: CanonicalStrategy) -> Quality | None:
        """Return what is known of the perplexity of a strategy, which need not have been trained.

        Its own runs count before those with the same numerics, and these before those whose codecs
        see other vectors. Of what was trained with a part of its codecs alone, the worst counts,
        since more codecs hardly improve it. None: nothing like it was trained.
        """
        wanted = Numerics.of(strategy)
        if wanted == Numerics.of(self.reference.strategy):
            return Quality(1.0, "computes what the start computes")
        known = [(Numerics.of(each.strategy), each) for each in self.measured.values()]
        trained = [(each, entry) for each, entry in known if _was_trained(entry)]
        own = [entry for _, entry in trained if entry.hash == strategy.hash()]
        same = [entry for each, entry in trained if each == wanted]
        alike = [entry for each, entry in trained if each.alike(wanted)]
        for entries, what in ((own, "its own"), (same, "the same numerics"), (alike, "its codecs")):
            if entries:
                logs = [math.log(perplexity_ratio(entry, self.reference)) for entry in entries]
                sources = ", ".join(entry.source for entry in entries)
                mean = math.exp(sum(logs) / len(logs))
                return Quality(mean, f"{what}: {sources}", sure=entries is not alike)
        parts = [entry for each, entry in trained if wanted.includes(each)]
        worst = max(parts, key=lambda entry: perplexity_ratio(entry, self.reference), default=None)
        if worst is None:
            return None
        ratio = perplexity_ratio(worst, self.reference)
        return Quality(ratio, f"a part of its codecs: {worst.source}", sure=False)

    def fastest(self, tolerance: float) -> Measured:
        """Return the admissible strategy whose steps were measured as the shortest.

        Admissible: it did not fail, and runs with the same numerics say that its perplexity is
        tolerated.
        """
        found = [
            entry
            for entry in self.measured.values()
            if entry.steps
            and entry.outcome == "ok"
            and (quality := self.quality(entry.strategy)) is not None
            and quality.tolerated(tolerance)
        ]
        return min(found, key=lambda each: each.steps[-1].ratio, default=self.reference)


def perplexity_ratio(entry: Measured, reference: Measured) -> float:
    """Return the perplexity of a strategy that was trained over the reference's."""
    if entry.outcome == "diverged":
        return math.inf
    return mean_ratio(entry.measurements, reference.measurements)


def mean_ratio(runs: Iterable[Measurement], others: Iterable[Measurement]) -> float:
    """Return the geometric mean over seeds of the perplexity over the other's; NaN without one."""
    known = {each.seed: each.val_ppl for each in others}
    logs = [math.log(each.val_ppl / known[each.seed]) for each in runs if each.seed in known]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def paired_steps(step_ms: Sequence[float], others: Sequence[float], source: str) -> StepRatio:
    """Return the ratio of interleaved steps over others, over the repetitions that both have."""
    count = min(len(step_ms), len(others))
    found = paired_ratio(step_ms[:count], others[:count])
    return StepRatio(source=source, repetitions=count, **found._asdict())


def initial_history(
    records: Sequence[Record], timed: Iterable[TimedRun], agent: Agent, train: Train
) -> History:
    """Return the state before the first round: all that was measured for this workload.

    The fastest admissible strategy is held, and the first race has to confirm it.

    Args:
        records: of the matrix.
        timed: of all timings; those with the ranks and the link of the search count.

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
        entry = _of_run(run, runs[run])
        measured.setdefault(entry.hash, entry)
    start = next(iter(measured.values()))
    if start.outcome != "ok":
        raise UserError(
            f"agent.start: run {agent.start!r} diverged ({start.detail}): name another run"
        )
    for entry in _of_timings(timed, start.hash, workload):
        known = measured.get(entry.hash, entry)
        steps = [*known.steps, *entry.steps] if known is not entry else entry.steps
        measured[entry.hash] = known.model_copy(update={"steps": steps})
    history = History(workload=workload, start=start.hash, incumbent=start.hash, measured=measured)
    best = history.fastest(agent.quality_tolerance)
    return history.model_copy(update={"incumbent": best.hash})


def known_before(after: str, results: str, first: History) -> History:
    """Return the state that a round starts from: `first` (`after` is `results`), or a history.

    Raises:
        UserError: the earlier history lacks something of the first, so it is out of date.
    """
    if after == results:
        return first
    history = History.from_file(after, f"run python -m stages.decide {Path(after).parent.name}")
    for key, entry in first.measured.items():
        if key not in history.measured:
            raise UserError(
                f"{after}: knows nothing of {entry.source} in {results}: repeat the earlier rounds"
            )
    return history


def _was_trained(entry: Measured) -> bool:
    return bool(entry.measurements) or entry.outcome == "diverged"


def _of_run(run: str, records: list[Record]) -> Measured:
    strategy = parse_strategy(records[0].strategy, f"strategy of run {run}")
    records = sorted(records, key=lambda record: record.seed)
    diverged = [f"seed {each.seed}: {each.divergence}" for each in records if each.divergence]
    return Measured(
        strategy=strategy.canonical(),
        hash=strategy.hash(),
        source=f"run {run}",
        outcome="diverged" if diverged else "ok",
        detail="; ".join(diverged),
        measurements=[] if diverged else [Measurement.of(each) for each in records],
    )


def _of_timings(timed: Iterable[TimedRun], start: str, workload: Workload) -> list[Measured]:
    """Return the steps of every strategy that was timed with the start, as this search would."""
    timings: dict[str, list[TimedRun]] = {}
    for run in timed:
        if (run.world_size, run.link) == (workload.world_size, workload.link):
            timings.setdefault(run.timing, []).append(run)
    found = []
    for name, runs in timings.items():
        reference = next((run for run in runs if run.strategy_hash == start), None)
        for run in runs:
            if reference is None or run.run == NO_COMMUNICATION:
                continue
            strategy = parse_strategy(run.strategy, f"strategy of {run.run} in timing {name}")
            found.append(
                Measured(
                    strategy=strategy.canonical(),
                    hash=strategy.hash(),
                    source=f"timing {name}",
                    steps=[paired_steps(run.step_ms, reference.step_ms, f"timing {name}")],
                )
            )
    return found


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
    link = agent.link or train.link
    values = {name: getattr(records[0], name) for name in names}
    memory = records[0].host["memory_bytes"] // records[0].world_size
    return Workload(
        **values | {"link": LOOPBACK if link is None else link.name, "memory_bytes": memory}
    )
