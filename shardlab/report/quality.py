"""Time to quality and quality at a time, by training loss.

Runs of one seed see the same batches in the same steps, so their losses compare step by step. One
batch is more difficult than another; a mean over the last twentieth of the run's steps takes most
of that out.
"""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

_SHARE = 20


def smoothed(losses: Iterable[float]) -> pd.Series:
    """Return the running mean over the last twentieth of the steps, over fewer at the beginning."""
    curve = pd.Series([*losses], dtype=float)
    window = curve.rolling(max(1, len(curve) // _SHARE), min_periods=1)
    # of raw values: a loss that is not finite must show
    return window.apply(np.mean, raw=True)


def steps_to_quality(losses: Iterable[float], threshold: float) -> float | None:
    """Return the steps until the smoothed loss reaches `threshold`, interpolated between two steps.

    Args:
        losses: nats per token, one for every step.

    Returns:
        None for a run that did not get there.
    """
    curve = smoothed(losses)
    reached = np.flatnonzero(curve <= threshold)
    if not len(reached):
        return None
    if reached[0] == 0:
        return 1.0
    before, after = curve[reached[0] - 1], curve[reached[0]]
    return float(reached[0] + (before - threshold) / (before - after))


def quality_at_time(losses: Iterable[float], times: ArrayLike, moment: float) -> float | None:
    """Return the smoothed loss of the last step that had ended; a finished run keeps its last loss.

    Args:
        losses: nats per token, one for every step.
        times: when each step ended, ascending, in the unit of `moment`.

    Returns:
        None as long as no step has ended.
    """
    ended = np.searchsorted(times, moment, side="right")
    return float(smoothed(losses)[ended - 1]) if ended else None
