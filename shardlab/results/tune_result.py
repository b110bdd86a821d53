"""Result of one training run that tunes a method, or that measures when it reaches a loss."""

from typing import Literal

from shardlab.core.types import Betas
from shardlab.results.result import Finite, Result


class TuneResult(Result):
    """Loss of a run; `run` is the method, by the first of its strategies.

    Micro-batches are one larger batch of each rank here, which is the same up to rounding.
    """

    kind: Literal["tune"] = "tune"
    key: str
    """16 hexadecimal digits of a hash over everything that the loss depends on: runs with equal
    keys are the same run."""
    micro_batches: int
    """Micro-batches of a step, of all ranks."""
    steps: int
    learning_rate: float
    betas: Betas
    tokens_per_step: int
    """Tokens of all ranks in a step."""
    bytes_wire: float
    """Bytes per step that a rank sent."""
    val_loss: Finite
    """Nats per token after the last step; None where it is not finite."""
    val_tokens: int
