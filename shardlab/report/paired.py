"""Paired comparison of runs, by seed or by repetition, with its interval.

What runs of one seed or steps of one repetition have in common cancels. The uncertainty is that of
the differences: Student's t with n - 1 degrees of freedom. Times and perplexities are compared as
ratios, through their logarithms.
"""

import math

import numpy as np
import pandas as pd

from shardlab.core.interval import interval_factor


def paired_difference(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return the difference of every run to the baseline, row by row.

    Args:
        values: one row per seed or repetition, one column per run.

    Returns:
        Indexed by run: `mean`, and `low` and `high` of its 95 % interval (NaN for a single row).
    """
    # skip nothing: a value that is not finite must show in the result; inf - inf is then expected
    with np.errstate(invalid="ignore"):
        differences = values.sub(values[baseline], axis=0)
        n = len(differences)
        mean = differences.mean(skipna=False)
        deviation = differences.std(ddof=1, skipna=False)
        half = interval_factor(n) * deviation
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half})


def paired_ratio(values: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Return what `paired_difference` does, for the geometric mean of ratios to the baseline.

    Args:
        values: positive numbers.
    """
    with np.errstate(over="ignore"):
        return np.exp(paired_difference(np.log(values), baseline))


def verdict(low: float, high: float, none: float) -> str:
    """Compare an interval with the value of no difference: `higher`, `lower`, or `same`.

    Returns:
        `unknown` without an interval, which a single row or a diverged run does not have.
    """
    if not (math.isfinite(low) and math.isfinite(high)):
        return "unknown"
    if low > none:
        return "higher"
    return "lower" if high < none else "same"
