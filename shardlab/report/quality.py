"""Steps and time to a loss, and the loss at a time, of training and of validation curves.

A curve is a loss by the number of steps that were done. Runs of one seed see the same batches in
the same steps, so their losses compare step by step. One batch is more difficult than another; a
mean over the last twentieth of the run's steps takes most of that out. Validation losses are of the
same tokens each time, and stay as they are.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from shardlab.report.settings import Quality
from shardlab.results.train_result import TrainResult

_SHARE = 20


def training_curve(losses: Iterable[float]) -> pd.Series:
    """Return the running mean over the last twentieth of the steps, over fewer at the beginning.

    Args:
        losses: nats per token, one for every step.
    """
    values = [*losses]
    curve = pd.Series(values, pd.RangeIndex(1, len(values) + 1), dtype=float)
    window = curve.rolling(max(1, len(curve) // _SHARE), min_periods=1)
    # of raw values: a loss that is not finite must show
    return window.apply(np.mean, raw=True)


def steps_to_quality(curve: pd.Series, threshold: float) -> float | None:
    """Return the steps until a loss reaches `threshold`, interpolated between two points.

    Returns:
        None for a run that did not get there; the steps of the first point where that has it.
    """
    reached = np.flatnonzero(curve <= threshold)
    if not len(reached):
        return None
    at = reached[0]
    if at == 0 or not curve.iloc[at - 1] > threshold:
        return float(curve.index[at])
    before, after = curve.iloc[at - 1], curve.iloc[at]
    steps, more = curve.index[at - 1], curve.index[at]
    return float(steps + (more - steps) * (before - threshold) / (before - after))


def quality_after(curve: pd.Series, steps: float) -> float | None:
    """Return the loss of the last point by then; a finished run keeps its last loss.

    Args:
        steps: those done, and a part of the next one.

    Returns:
        None before the first point, and where the loss is not finite.
    """
    ended = np.searchsorted(curve.index, steps, side="right")
    loss = float(curve.iloc[ended - 1]) if ended else np.nan
    return loss if np.isfinite(loss) else None


def has_warmup(record: TrainResult) -> bool:
    """Return whether the first steps take another time than the others."""
    parts = (record.strategy.get(part) or {} for part in ("sync", "gradients"))
    return any(part.get("warmup_steps") for part in parts)


def quality_row(
    record: TrainResult, curves: Mapping[str, pd.Series], quality: Quality
) -> dict[str, Any]:
    """Return the time to each loss and the loss at each time of a training run, by its own steps.

    Time to a loss is the steps to it times the mean timed step of the run, without evaluations;
    None where the loss is not reached, and of a run with a warm-up, whose mean step is no step of
    its beginning.

    Args:
        curves: of `train_loss` and, where there is one, of `val_loss`.
    """
    thresholds: dict[str, Sequence[float]] = {
        "train_loss": quality.train_loss,
        "val_loss": quality.val_loss,
    }
    step_s = None if has_warmup(record) else record.step_ms_mean / 1e3
    steps = {
        name: {f"{loss:.12g}": steps_to_quality(curve, loss) for loss in thresholds[name]}
        for name, curve in curves.items()
    }

    def seconds(count: float | None) -> float | None:
        return None if count is None or step_s is None else count * step_s

    def loss_at(curve: pd.Series, moment: float) -> float | None:
        return None if step_s is None else quality_after(curve, moment / step_s)

    return {
        "run": record.run,
        "seed": record.seed,
        "strategy_hash": record.strategy_hash,
        "link": record.link,
        "step_ms_mean": record.step_ms_mean,
        "steps_to_quality": steps,
        "time_to_quality_s": {
            name: {loss: seconds(count) for loss, count in reached.items()}
            for name, reached in steps.items()
        },
        "quality_at_time": {
            name: {f"{moment:.12g}": loss_at(curve, moment) for moment in quality.time_s}
            for name, curve in curves.items()
        },
    }
