"""State of the search: what was measured of each strategy, the incumbent, and the rounds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from shardlab.config.race_record import Race
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.document import Document
from shardlab.core.interval import paired_ratio
from shardlab.search.numerics import Numerics
from shardlab.search.rounds import Measurement, Outcome, Round, StepRatio


class Workload(Document):
    """Workload that every strategy of one search trains."""

    model: str
    parameters: int
    world_size: int
    """ranks of the search"""
    trained_on: int
    """ranks of the training runs"""
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


class Ended(Document):
    """A search that another one followed."""

    search: str
    workload: Workload
    held: Measured
    measured: dict[str, Measured] = {}
    """by hash of the strategy: what a later search of the same workload begins with"""


class History(Document):
    """Everything that the search knows between two rounds."""

    search: str = ""
    """its name; empty for the one that has none"""
    workload: Workload
    start: str
    """hash of the strategy that the search started from: the reference for steps and quality"""
    incumbent: str
    """hash of the strategy that is held"""
    measured: dict[str, Measured]
    """by hash of the strategy"""
    rounds: list[Round] = []
    """of the searches before, too"""
    races: list[Race] = []
    """of the rounds, for the forecast to be fitted on"""
    ended: list[Ended] = []
    """searches before this one"""

    @property
    def held(self) -> Measured:
        """The incumbent."""
        return self.measured[self.incumbent]

    @property
    def reference(self) -> Measured:
        """The strategy that the search started from."""
        return self.measured[self.start]

    @property
    def own_rounds(self) -> list[Round]:
        """The rounds of this search since it began, perhaps again after another one."""
        own = list(takewhile(lambda each: each.search == self.search, reversed(self.rounds)))
        return own[::-1]

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
        trained = [(each, entry) for each, entry in known if was_trained(entry)]
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

    def peak(self, entry: Measured) -> int | None:
        """Return the largest measured peak of a rank, bytes.

        None: it was not trained, or on other ranks than the search has, which changes the peak.
        """
        if self.workload.world_size != self.workload.trained_on:
            return None
        return max((each.memory_peak_bytes for each in entry.measurements), default=None)

    def fits(self, entry: Measured, limit_bytes: int, predicted: Mapping[str, int]) -> bool:
        """Return whether a peak of a rank is within the limit; true where none is known.

        Args:
            predicted: peaks by hash, where none was measured.
        """
        return (self.peak(entry) or predicted.get(entry.hash, 0)) <= limit_bytes

    def fastest(self, tolerance: float, limit_bytes: int, predicted: Mapping[str, int]) -> Measured:
        """Return the admissible strategy whose steps were measured as the shortest.

        Admissible: it did not fail, runs with the same numerics say that its perplexity is
        tolerated, and it fits. The start, where none is.

        Args:
            limit_bytes, predicted: of `fits`.
        """
        found = [
            entry
            for entry in self.measured.values()
            if entry.steps
            and entry.outcome == "ok"
            and (quality := self.quality(entry.strategy)) is not None
            and quality.tolerated(tolerance)
            and self.fits(entry, limit_bytes, predicted)
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


def is_hopeless(
    runs: Sequence[Measurement], others: Iterable[Measurement], seeds: int, tolerance: float
) -> bool:
    """Return whether the seeds left can hardly bring the mean within the tolerance.

    They would have to be better than the other's by more than the tolerance. Of three seeds, with
    a tolerance of 3 %, the first says so where it is worse by 16 %.
    """
    ratio, left = mean_ratio(runs, others), seeds - len(runs)
    return len(runs) * math.log(ratio) > (seeds + left) * math.log1p(tolerance)


def paired_steps(step_ms: Sequence[float], others: Sequence[float], source: str) -> StepRatio:
    """Return the ratio of interleaved steps over others, over the repetitions that both have."""
    count = min(len(step_ms), len(others))
    found = paired_ratio(step_ms[:count], others[:count])
    return StepRatio(source=source, repetitions=count, **found._asdict())


def was_trained(entry: Measured) -> bool:
    """Return whether its perplexity was measured, or it diverged."""
    return bool(entry.measurements) or entry.outcome == "diverged"
