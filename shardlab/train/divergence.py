"""Rule by which a run has diverged: it stops then, and its record says at which step."""

import math
from collections.abc import Sequence
from typing import Any

from shardlab.train.loop import StepEvent

_PATIENCE = 3
"""steps in a row without an update: one alone may be a bad batch"""
_HALVINGS = 16
"""more, while the loss scale of fp16 goes from 2**16 to 1"""


def has_diverged(events: Sequence[StepEvent], loss_scaled: bool) -> bool:
    """Return whether so many last steps were left out that none will succeed; alike on all ranks.

    Args:
        loss_scaled: whether fp16 scales the loss.
    """
    patience = _PATIENCE + (_HALVINGS if loss_scaled else 0)
    return len(events) >= patience and not any(event.applied for event in events[-patience:])


def divergence_step(events: Sequence[dict[str, Any]], steps: int) -> int | None:
    """Return the first of the last steps without finite loss and gradient; None if it recovered.

    Args:
        events: of the steps that ran, merged over ranks.
        steps: that were to run.
    """
    if len(events) == steps and _is_finite(events[-1]):
        return None
    good = (n for n, event in enumerate(events) if event["applied"] and _is_finite(event))
    return int(events[max(good, default=-1) + 1]["step"])


def _is_finite(event: dict[str, Any]) -> bool:
    return math.isfinite(event["loss"])
