"""Result of one training run by which a method is tuned, or that shows how soon it reaches a
loss."""

from typing import Literal

from shardlab.core.types import Betas
from shardlab.results.result import Finite, Result


class TuneResult(Result):
    """Loss of a run; its run is the method, of which the first strategy was trained.

    Micro-batches are one larger batch of each rank here, which is the same up to rounding.
    """

    kind: Literal["tune"] = "tune"
    key: str
    """16 hexadecimal digits of a hash over all that the loss depends on: runs with the same key
    are the same run"""
    micro_batches: int
    """of a step, of all ranks together"""
    steps: int
    learning_rate: float
    betas: Betas
    tokens_per_step: int
    """of all ranks"""
    bytes_wire: float
    """bytes per step that a rank sent"""
    val_loss: Finite
    """nats per token, after the last step; None where it is not finite"""
    val_tokens: int
