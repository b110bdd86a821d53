"""The confidence interval that all comparisons state."""

import math

# not scipy.stats, whose import takes half a second for this one quantile
from scipy.special import stdtrit

CONFIDENCE = 0.95


def interval_factor(count: int) -> float:
    """Return half the width of the interval of a mean, in sample standard deviations of the values.

    Student's t with `count - 1` degrees of freedom over sqrt(count); NaN for a single value.
    """
    if count < 2:
        return math.nan
    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2)) / math.sqrt(count)
