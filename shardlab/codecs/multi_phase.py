"""Contract of multi-phase methods: several phases of summable messages instead of one payload."""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey, Unit


class Communicator(Protocol):
    """Collectives of which the phases of a method consist."""

    rank: int
    world_size: int

    def sum(self, vector: Tensor) -> None:
        """vector[m] = sum over ranks of vector, float32 or int8, in place; the same bytes on all
        ranks."""

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """Return the sum over ranks of chunk `rank` of vector[world_size * m]: [m], of the same
        dtype."""

    def largest(self, vector: Tensor) -> None:
        """vector[m] = maximum over ranks of vector, float32, in place."""

    def gather(self, shard: Tensor) -> Tensor:
        """Return the shards[m] of all ranks, concatenated: [world_size * m], of the same dtype.

        Positions of elements are integers, and counted as such.
        """

    def uncompressed(self, reason: str) -> None:
        """Report that the vector summed now is sent uncompressed, and why."""


class MultiPhaseMethod(ABC):
    """Approximate sum of vectors over ranks, in phases whose messages can be summed on the wire.

    Laws, where rank r holds x_r and contributes sent_r, and all ranks call in the same order:
    - the result is the sum over ranks of sent_r, the same bytes wherever two ranks hold it;
    - `given` becomes x_r - sent_r (what was not sent), up to rounding in float32;
    - the result is a function of the vectors, the key and `state` alone;
    - a NaN or an infinity on any rank makes the result hold one on every rank; then `given` may
      hold anything, and `state` is as it was, or as it begins.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        """what is carried from step to step (bases, previous factors), by unit; in checkpoints"""

    @abstractmethod
    def sum_scatter(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:
        """Return the sum over ranks of chunk `wire.rank` of given[world_size * n]: float32 [n].

        Args:
            given: float32, contiguous; overwritten with what was not sent.
            key: its seed, step and unit are the same on all ranks.
        """

    @abstractmethod
    def sum(self, given: Tensor, unit: Unit, wire: Communicator, key: MessageKey) -> Tensor:
        """Return the sum over ranks of given[n]: float32 [n], the same bytes on all ranks."""

    def elements_sent(self, n: int) -> int:
        """Return how many of n elements can differ from zero in sent_r."""
        return n

    def reset(self) -> None:
        """Clear `state`."""
        self.state.clear()


Method = Codec | MultiPhaseMethod
"""whatever a strategy can name as a codec"""


def alarm(values: Tensor) -> Tensor:
    """Return 0 if all values are finite, else NaN: float32 []. Its sum informs all ranks."""
    if not values.numel():
        return values.new_zeros(())
    largest: Tensor = torch.linalg.vector_norm(values, ord=float("inf"))
    return 0 * largest


def all_finite(values: Tensor) -> bool:
    """Return whether there is neither a NaN nor an infinity in `values`."""
    return not bool(alarm(values).isnan())
