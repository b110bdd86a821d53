"""Contract of multi-phase methods: several phases of summable messages instead of one payload."""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey, Unit


class Communicator(Protocol):
    """Collectives that a multi-phase method calls, one for each phase."""

    rank: int
    world_size: int

    def all_reduce(self, vector: Tensor) -> None:
        """Set vector[m], float32 or int8, to its sum over ranks: the same bytes on all ranks."""

    def reduce_scatter(self, vector: Tensor) -> Tensor:
        """Return chunk `rank` of the sum over ranks of vector[world_size * m]: [m], same dtype."""

    def all_reduce_max(self, vector: Tensor) -> None:
        """Set vector[m], float32, to its maximum over ranks."""

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the shards[m] of all ranks, concatenated: [world_size * m], same dtype.

        Integers are counted as positions of elements.
        """

    def report_uncompressed(self, reason: str) -> None:
        """Report that this vector is sent uncompressed, with the reason."""


class MultiPhaseMethod(ABC):
    """Approximate sum of vectors over ranks, in phases whose messages can be summed on the wire.

    Laws, where rank r holds x_r and contributes sent_r, and all ranks call in the same order:
    - the result is the sum over ranks of sent_r, the same bytes wherever two ranks hold it;
    - `vector` becomes x_r - sent_r (what was not sent), up to rounding in float32;
    - the result is a function of the vectors, the key and `state` alone;
    - a NaN or an infinity on any rank makes the result hold one on every rank; then `vector` may
      hold anything, and `state` is as it was, or as it begins.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        """Bases or factors that the next step starts from, by unit; saved in checkpoints."""

    @abstractmethod
    def reduce_scatter(
        self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey
    ) -> Tensor:
        """Return chunk `comm.rank` of the sum over ranks of vector[world_size * n]: float32 [n].

        Args:
            vector: float32, contiguous; overwritten with what was not sent.
            key: Its seed, step and unit are the same on all ranks.
        """

    @abstractmethod
    def all_reduce(self, vector: Tensor, unit: Unit, comm: Communicator, key: MessageKey) -> Tensor:
        """Return the sum over ranks of vector[n]: float32 [n], the same bytes on all ranks."""

    def elements_sent(self, n: int) -> int:
        """Return the largest number of elements of sent_r[n] that are not zero."""
        return n

    def reset(self) -> None:
        """Clear `state`."""
        self.state.clear()


Method = Codec | MultiPhaseMethod
"""Type of everything that a strategy can name as a codec."""


def alarm(values: Tensor) -> Tensor:
    """Return 0 if all values are finite, else NaN: float32 [].

    A sum over ranks that includes it is NaN on every rank if a value on one rank is not finite.
    """
    if not values.numel():
        return values.new_zeros(())
    largest: Tensor = torch.linalg.vector_norm(values, ord=float("inf"))
    return 0 * largest


def all_finite(values: Tensor) -> bool:
    """Return whether `values` holds neither a NaN nor an infinity; the host waits for a device."""
    return not bool(alarm(values).isnan())
