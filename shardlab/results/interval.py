"""Confidence intervals of ratios, as all comparisons state them."""

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

CONFIDENCE = 0.95


def interval_factor(count: int) -> float:
    """Return half the width of the interval of a mean, in sample standard deviations of the values.

    Student's t with `count - 1` degrees of freedom over sqrt(count); NaN for a single value.
    """
    if count < 2:
        return math.nan
    # imported here, since scripts that only write records need no interval; scipy.stats would take
    # half a second to import
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / math.sqrt(count)


def pauses(times: Sequence[float]) -> list[bool]:
    """Return, for each time, whether the machine paused in it, so that it is not a measurement.

    A pause is longer than twice the median, and more than ten standard deviations above it. The
    standard deviation is estimated as 1.4826 times the median distance from the median, which a few
    pauses do not change.
    """
    middle = statistics.median(times)
    deviation = 1.4826 * statistics.median(abs(time - middle) for time in times)
    return [time > max(2 * middle, middle + 10 * deviation) for time in times]


class Ratio(NamedTuple):
    """Geometric mean of paired ratios with its interval; NaN for a single pair."""

    ratio: float
    low: float
    high: float

    @property
    def inverse(self) -> "Ratio":
        """The inverse ratio."""
        return Ratio(1 / self.ratio, 1 / self.high, 1 / self.low)

    def times(self, other: "Ratio") -> "Ratio":
        """Return the product with an independent ratio, as a / c from a / b and b / c: the
        half-widths of the logarithms add in quadrature."""
        logs = [tuple(map(math.log, (r.ratio, r.low, r.high))) for r in (self, other)]
        mean = logs[0][0] + logs[1][0]
        below, above = (math.hypot(*(log[end] - log[0] for log in logs)) for end in (1, 2))
        return Ratio(*map(math.exp, (mean, mean - below, mean + above)))

    def over(self, other: "Ratio") -> "Ratio":
        """Return the quotient of independent ratios, as a / c from a / b and c / b.

        At most one of `a.over(c)` and `c.over(a)` ends below 1: the difference of two logarithms
        changes its sign exactly, where the logarithm of an inverse may be rounded otherwise.
        """
        ratio, low, high = map(math.log, self)
        divisor, divisor_low, divisor_high = map(math.log, other)
        mean = ratio - divisor
        below = math.hypot(ratio - low, divisor_high - divisor)
        above = math.hypot(high - ratio, divisor - divisor_low)
        return Ratio(*map(math.exp, (mean, mean - below, mean + above)))


def paired_ratio(values: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return values over a baseline, pair by pair: Student's interval of the mean of the
    logarithms.

    Pairs with a NaN, which is not a measurement, are left out. Without any pair, all is NaN.
    """
    pairs = [pair for pair in zip(values, baseline, strict=True) if not any(map(math.isnan, pair))]
    logs = [math.log(value / divisor) for value, divisor in pairs]
    if not logs:
        return Ratio(math.nan, math.nan, math.nan)
    mean = sum(logs) / len(logs)
    square = sum((log - mean) ** 2 for log in logs) / max(len(logs) - 1, 1)
    half = interval_factor(len(logs)) * math.sqrt(square)
    return Ratio(*map(math.exp, (mean, mean - half, mean + half)))


def geometric_mean(values: Sequence[float]) -> Ratio:
    """Return the geometric mean with its interval; NaN, which is not a measurement, is left out."""
    return paired_ratio(values, [1.0] * len(values))


def interleaved_ratio(values: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Return values over a baseline, of two timings with interleaved repetitions.

    The longer timing has several repetitions between two of the shorter. Both are split into as
    many blocks as the shorter has repetitions, of sizes as equal as possible. The geometric means
    of blocks at the same position are paired, so that a drift of the machine cancels.

    Args:
        values, baseline: times in their order, NaN where there is no measurement.
    """
    count = min(len(values), len(baseline))
    return paired_ratio(*(_blocks(times, count) for times in (values, baseline)))


def _blocks(times: Sequence[float], count: int) -> list[float]:
    """Return the geometric means of `count` blocks; NaN for a block without a measurement."""
    ends = [index * len(times) // count for index in range(count + 1)]
    return [geometric_mean(times[first:end]).ratio for first, end in pairwise(ends)]


def enclosing(ratios: Iterable[Ratio]) -> Ratio:
    """Return the geometric mean of one ratio in several timings, with an interval that encloses all
    of their intervals: repetitions of one timing do not show by how much another timing differs.

    The interval is NaN where a timing has none.
    """
    means, lows, highs = zip(*ratios, strict=True)
    mean = math.exp(sum(map(math.log, means)) / len(means))
    if any(map(math.isnan, (*lows, *highs))):
        return Ratio(mean, math.nan, math.nan)
    return Ratio(mean, min(lows), max(highs))
