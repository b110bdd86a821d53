"""The one interval that every comparison states."""

import math

from scipy.stats import t as student_t

CONFIDENCE = 0.95


def interval_factor(count: int) -> float:
    """Half the width of the interval of a mean, in sample standard deviations of the values.

    Student's t with `count - 1` degrees of freedom over sqrt(count); NaN for a single value.
    """
    if count < 2:
        return math.nan
    return float(student_t.ppf((1 + CONFIDENCE) / 2, count - 1)) / math.sqrt(count)
