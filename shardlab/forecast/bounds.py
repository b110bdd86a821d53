"""No-communication bounds of timings: how long a step computes, and how far the machine drifts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.forecast.work import Compute

_PARTS = 8
"""of a timing, to tell how the speed drifts in it"""
_OF_PART = 10
"""repetitions, whose median says more of the machine than of chance"""


class Bound(NamedTuple):
    """Computation of a step, as one timing measured it."""

    timing: str
    busy: int
    """cores that computed at once"""
    compute: Compute
    """of one rank that has its cores to itself"""
    error: float
    """relative standard error"""
    drift: float = 0.0
    """standard deviation of the speed over parts of the timing, relative to it"""


class Speed(NamedTuple):
    """Time that computation takes, relative to that of the timings that a model was fitted on."""

    mean: float = 1.0
    drift: float = 0.0
    """standard deviation of one more timing from the mean, relative to it"""
    calibration: float = 0.0
    """standard deviation of the calibration, which was at another time: at least the same"""


def bounds_of(runs: Iterable[TimedRun], cores: float) -> tuple[Bound, ...]:
    """Return the bounds among timed runs, in their order."""
    return tuple(
        Bound(
            run.timing,
            busy_cores(run.world_size * run.threads, cores),
            fit_compute(run, cores),
            standard_error(run.step_ms),
            drift_within(run.step_ms),
        )
        for run in runs
        if run.run == NO_COMMUNICATION
    )


def busy_cores(threads: int, cores: float) -> int:
    """Return how many cores compute at once."""
    return round(min(threads, cores))


def mean_compute(bounds: Sequence[Bound]) -> dict[int, Compute]:
    """Return the mean computation by the number of busy cores."""
    alike: dict[int, list[Compute]] = {}
    for bound in bounds:
        alike.setdefault(bound.busy, []).append(bound.compute)
    return {busy: Compute(*map(_mean, zip(*each, strict=True))) for busy, each in alike.items()}


def speed_of(bounds: Sequence[Bound], fitted: Mapping[int, Compute]) -> Speed:
    """Return the speed of one more timing, as those of as many busy cores tell it.

    Args:
        fitted: computation that the speed is relative to, by the number of busy cores.
    """
    within = max(bound.drift for bound in bounds)
    counts = Counter(bound.busy for bound in bounds)
    known = [each for each in bounds if counts[each.busy] > 1 and each.busy in fitted]
    if not known:
        drift = _mean([bound.error for bound in bounds])
        return Speed(1.0, drift, max(drift, within))
    factors = [sum(each.compute) / sum(fitted[each.busy]) for each in known]
    # of the other timing itself, and of the mean; its median is of as few repetitions
    variance = (1 + 1 / len(factors)) * float(np.var(factors, ddof=1))
    mean = _mean(factors)
    drift = variance**0.5 / mean
    # timings that took turns differ less than the machine drifts in their time
    return Speed(mean, drift, max(drift, within))


def fit_compute(run: TimedRun, cores: float) -> Compute:
    """Return the compute times of one rank that has its cores to itself, from ranks that share
    them.

    Traced steps say how a step is divided, the others how long it is.
    """
    traced = run.breakdown
    parts = Compute(traced.forward_ms, traced.backward_ms, traced.update_ms)
    share = min(1.0, cores / (run.world_size * run.threads))
    return parts.scaled(share * step_s(run) / sum(parts))


def step_s(run: TimedRun) -> float:
    """Return the measured step time in seconds: the median of the repetitions."""
    return median(run.step_ms) / 1e3


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the median relative to it: 1.25 times that of a normal mean."""
    if len(values) < 2:
        return 0.0
    return float(1.25 * np.std(values, ddof=1) / len(values) ** 0.5 / np.median(values))


def drift_within(values: Sequence[float]) -> float:
    """Return the standard deviation of the medians of consecutive parts, relative to their mean,
    without what their repetitions explain; 0 where there are too few."""
    if len(values) < _PARTS * _OF_PART:
        return 0.0
    parts = [part.tolist() for part in np.array_split(values, _PARTS)]
    medians = [median(part) for part in parts]
    chance = _mean([standard_error(part) ** 2 for part in parts])
    variance = float(np.var(medians, ddof=1)) / _mean(medians) ** 2 - chance
    return float(np.sqrt(max(variance, 0.0)))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))
