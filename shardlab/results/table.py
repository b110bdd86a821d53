"""Table of measurements: for each strategy all of its results, on all links.

Perplexity does not depend on the link or on the ranks of a timing. Steps and failures count only on
the link and the ranks on which they were measured. A step is compared with the step of a baseline
in the same timing, pair by pair.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardlab.core.document import Document
from shardlab.results.interval import Ratio, paired_ratio
from shardlab.results.result import Failure, Kind, Result, only
from shardlab.results.timing_result import TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import CanonicalStrategy, parse_strategy

_WIDEST = 4.0
"""Ratio of the ends of an interval above which the interval is not shown."""


class SearchWorkload(Document):
    """Workload that every strategy of one search trains."""

    model: str
    parameters: int
    world_size: int
    """Number of ranks of the search."""
    trained_on: int
    """Number of ranks of the training runs."""
    sequence_length: int
    batch_size: int
    accumulation: int
    link: str
    """Link of the search; training runs, which give quality, may have another link."""


class StepRatio(Document):
    """Step time over that of another strategy, in pairs of interleaved steps."""

    source: str
    """`timing NAME` or `round K`."""
    link: str
    world_size: int
    ratio: float
    low: float
    high: float
    repetitions: int
    """Number of pairs."""

    @property
    def interval(self) -> str:
        """The ends in words, or that the interval is too wide to tell half from twice the step.

        A race of 10 repetitions has two blocks, and Student's t of one degree of freedom at the
        error of a race is over 100: such an interval may end at 85,799.
        """
        if self.high <= _WIDEST * self.low:
            return f"{self.low:.3f} to {self.high:.3f}"
        return "interval too wide to tell"


@dataclass(frozen=True)
class StrategyResults:
    """Row of the table: all measurements of one strategy."""

    strategy: CanonicalStrategy
    hash: str
    source: str
    """First measurement of the strategy: `run NAME`, `timing NAME` or `round K`."""
    trained: Sequence[TrainResult] = ()
    """Training runs, one per seed; empty where a seed failed or diverged."""
    steps: Sequence[StepRatio] = ()
    """Steps over the baseline's, the latest last."""
    failures: Sequence[Failure] = ()

    @property
    def files(self) -> str | None:
        """Folder with the files of its training runs, in the layout of `results`; None where no
        round trained it."""
        if not self.trained or self.trained[0].kind == "train":
            return None
        return f"results/rounds/{self.trained[0].timing.removeprefix('round-')}/runs"

    @property
    def folder(self) -> str | None:
        """Folder with seedS/final_model, seedS/trace.json.gz and seedS/events.jsonl for each seed;
        None without training runs."""
        return f"{self.files or 'results'}/train/{self.trained[0].run}" if self.trained else None

    @property
    def diverged(self) -> bool:
        """Whether a race or a training run of the strategy diverged."""
        return any(failure.outcome == "diverged" for failure in self.failures)

    def peak(self, load: SearchWorkload) -> int | None:
        """Return the peak of a rank in its training runs, in bytes; None without training runs on
        as many ranks as the search has."""
        if load.world_size != load.trained_on:
            return None
        return max((run.memory_peak_bytes for run in self.trained), default=None)

    def step(self, load: SearchWorkload) -> StepRatio | None:
        """Return the latest step ratio on the link and the ranks of a search."""
        steps = [step for step in self.steps if _is_on(step, load)]
        return steps[-1] if steps else None

    def failure(self, load: SearchWorkload) -> Failure | None:
        """Return the latest failure that counts in a search.

        A divergence counts on every link. A failure in the training of a round counts in every
        search with as many ranks in training.
        """
        failures = [
            failure
            for failure in self.failures
            if failure.outcome == "diverged"
            or _is_on(failure, load)
            or (failure.kind == "trial" and failure.world_size == load.trained_on)
        ]
        return failures[-1] if failures else None


def _is_on(result: StepRatio | Failure, load: SearchWorkload) -> bool:
    return (result.link, result.world_size) == (load.link, load.world_size)


def step_ratio(result: TimingResult, baseline: TimingResult) -> Ratio:
    """Return the step of a result over the baseline's in the same timing, by the repetitions that
    both have, without pauses; NaN where there are none."""
    return paired_ratio(*zip(*_pairs(result, baseline), strict=True))


def _pairs(result: TimingResult, baseline: TimingResult) -> list[tuple[float, float]]:
    # a run that left a race has only the first repetitions
    return [*zip(result.measured_ms(), baseline.measured_ms(), strict=False)]


def ratio_to(
    results: Iterable[TimingResult], baseline: str
) -> list[tuple[TimingResult, StepRatio]]:
    """Return the results with a baseline in their timing, in their order, each with its step over
    the baseline's.

    Args:
        baseline: name or hash of a strategy.
    """
    results = [*results]
    baselines = {
        result.source: result
        for result in results
        if baseline in (result.run, result.strategy_hash)
    }
    ratios = []
    for result in results:
        if result.source not in baselines:
            continue
        pairs = _pairs(result, baselines[result.source])
        ratio = StepRatio(
            source=result.source,
            link=result.link,
            world_size=result.world_size,
            **step_ratio(result, baselines[result.source])._asdict(),
            repetitions=sum(not any(map(math.isnan, pair)) for pair in pairs),
        )
        ratios.append((result, ratio))
    return ratios


def results_by_strategy(results: Sequence[Result], baseline: str) -> dict[str, StrategyResults]:
    """Return the table of measurements by hash of the strategy, in the order of the results.

    Two names may stand for one strategy: the training runs of the first name count. A timing counts
    if it has the baseline.

    Args:
        baseline: hash of the strategy that steps are compared with.
    """
    rows: dict[str, StrategyResults] = {}
    steps = {
        (result.source, result.strategy_hash): ratio
        for result, ratio in ratio_to(only(results, TimingResult), baseline)
    }
    for (kind, source, key), group in _by_strategy(results).items():
        step = steps.get((source, key)) if kind in ("timing", "race") else None
        if (kind == "train" and key in rows) or (kind == "timing" and step is None):
            continue
        strategy = parse_strategy(group[0].strategy, f"strategy of {source}").canonical()
        row = rows.get(key, StrategyResults(strategy, key, source))
        trained, failures = _outcomes(group)
        rows[key] = replace(
            row,
            trained=trained or row.trained,
            steps=[*row.steps, *([] if step is None else [step])],
            failures=[*row.failures, *failures],
        )
    return rows


def _by_strategy(results: Iterable[Result]) -> dict[tuple[Kind, str, str], list[Result]]:
    """Return the results of each measurement and strategy, without steps of no strategy."""
    groups: dict[tuple[Kind, str, str], list[Result]] = {}
    for result in results:
        if result.strategy_hash is not None:
            key = result.kind, result.source, result.strategy_hash
            groups.setdefault(key, []).append(result)
    return groups


def _outcomes(results: Iterable[Result]) -> tuple[list[TrainResult], list[Failure]]:
    """Return the training runs of a strategy by seed, none where one failed; and what failed."""
    trained: list[TrainResult] = []
    failures: list[Failure] = []
    for result in sorted(results, key=lambda result: result.seed):
        if isinstance(result, TrainResult):
            trained.append(result)
            if result.divergence is not None:
                failures.append(result.failure())
        elif isinstance(result, Failure):
            failures.append(result)
    named = [
        failure
        if failure.kind == "race"
        else failure.model_copy(update={"detail": f"seed {failure.seed}: {failure.detail}"})
        for failure in failures
    ]
    return [] if failures else trained, named
