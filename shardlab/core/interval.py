"""The confidence interval that all comparisons state."""

import math
import statistics
from collections.abc import Sequence
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


def paired_ratio(values: Sequence[float], others: Sequence[float]) -> Ratio:
    """Return values over others, pair by pair: Student's interval of the mean of the logarithms."""
    logs = [math.log(one / other) for one, other in zip(values, others, strict=True)]
    mean = sum(logs) / len(logs)
    square = sum((log - mean) ** 2 for log in logs) / max(len(logs) - 1, 1)
    half = interval_factor(len(logs)) * math.sqrt(square)
    return Ratio(*map(math.exp, (mean, mean - half, mean + half)))
