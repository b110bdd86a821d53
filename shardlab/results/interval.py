"""The confidence interval that all comparisons state."""

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
    # here, since records of anybody's script need no interval; and not scipy.stats, whose import
    # takes half a second
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / math.sqrt(count)


def pauses(times: Sequence[float]) -> list[bool]:
    """Return which of the times are no measurement, as where the machine slept meanwhile.

    Longer than twice the median, and ten standard deviations beyond it: these are 1.4826 times the
    median distance from the median, which a few pauses do not change.
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
        """The ratio the other way round."""
        return Ratio(1 / self.ratio, 1 / self.high, 1 / self.low)

    def times(self, other: "Ratio") -> "Ratio":
        """Return the product with an independent ratio, as a / c from a / b and b / c: the
        half-widths of the logarithms add in quadrature."""
        logs = [tuple(map(math.log, (r.ratio, r.low, r.high))) for r in (self, other)]
        mean = logs[0][0] + logs[1][0]
        below, above = (math.hypot(*(log[end] - log[0] for log in logs)) for end in (1, 2))
        return Ratio(*map(math.exp, (mean, mean - below, mean + above)))


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return values over others, pair by pair: Student's interval of the mean of the logarithms.

    Pairs of which one is NaN, no measurement, are left out; where none is left all is NaN.
    """
    pairs = [pair for pair in zip(values, others, strict=True) if not any(map(math.isnan, pair))]
    logs = [math.log(one / other) for one, other in pairs]
    if not logs:
        return Ratio(math.nan, math.nan, math.nan)
    mean = sum(logs) / len(logs)
    square = sum((log - mean) ** 2 for log in logs) / max(len(logs) - 1, 1)
    half = interval_factor(len(logs)) * math.sqrt(square)
    return Ratio(*map(math.exp, (mean, mean - half, mean + half)))


def geometric_mean(values: Sequence[float]) -> Ratio:
    """Return the geometric mean with its interval; NaN, no measurement, is left out."""
    return paired_ratio(values, [1.0] * len(values))


def ratio_in_turns(values: Sequence[float], divisors: Sequence[float]) -> Ratio:
    """Return values over divisors, of two timings whose repetitions took turns.

    A timing of more repetitions has several between two of the other. Both are split into as many
    blocks as the shorter one has repetitions, of sizes as equal as can be, and the geometric means
    of the blocks beside each other are paired, so that a drift of the machine cancels.

    Args:
        values: in their order, NaN where there is no measurement.
        divisors: likewise.
    """
    count = min(len(values), len(divisors))
    return paired_ratio(*(_blocks(times, count) for times in (values, divisors)))


def _blocks(times: Sequence[float], count: int) -> list[float]:
    """Return the geometric means of as many blocks; NaN for one without a measurement."""
    ends = [index * len(times) // count for index in range(count + 1)]
    return [geometric_mean(times[first:end]).ratio for first, end in pairwise(ends)]


def enclosing(ratios: Iterable[Ratio]) -> Ratio:
    """Return the geometric mean of one ratio in several timings, from the least to the largest end
    of their intervals: repetitions of one timing do not show by how much another one differs.

    There is no interval where one of them has none.
    """
    means, lows, highs = zip(*ratios, strict=True)
    mean = math.exp(sum(map(math.log, means)) / len(means))
    if any(map(math.isnan, (*lows, *highs))):
        return Ratio(mean, math.nan, math.nan)
    return Ratio(mean, min(lows), max(highs))
