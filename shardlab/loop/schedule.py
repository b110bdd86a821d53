"""The learning rate as a function of the step."""

import math
from typing import Literal

_FLOOR = 0.1
"""share of the peak at the end of the cosine (Hoffmann et al. 2022, section B)"""


def learning_rate(
    step: int,
    steps: int,
    peak: float,
    warmup_steps: int,
    decay: Literal["cosine", "constant"] = "cosine",
) -> float:
    """Linear growth to `peak` over the warm-up, then cosine decay to a tenth of it, or `peak`.

    Args:
        step: counted from 0; steps beyond `steps` keep the last value.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if decay == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
