"""The contract of methods that take several rounds of messages instead of one payload."""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from torch import Tensor

from shardlab.codecs.base import MessageKey
from shardlab.codecs.unit import Unit


class Wire(Protocol):
    """Sums and gathers of float32 vectors over the ranks; what a round is made of."""

    rank: int
    world_size: int

    def sum(self, vector: Tensor) -> None:
        """vector[m] = sum over ranks of vector, in place; the same bytes on all ranks."""

    def sum_scatter(self, vector: Tensor) -> Tensor:
        """The sum over ranks of chunk `rank` of vector[world_size * m]: float32 [m]."""

    def gather(self, shard: Tensor) -> Tensor:
        """The shards[m] of all ranks, one after the other: float32 [world_size * m]."""


class Rounds(ABC):
    """Sums vectors over ranks approximately, in rounds whose messages can be summed on the wire.

    Laws, where rank r holds x_r and contributes sent_r, and all ranks call in the same order:
    - the result is the sum over ranks of sent_r, the same bytes wherever two ranks hold it;
    - `given` becomes x_r - sent_r (what was not sent), up to rounding in float32;
    - the result is a function of the vectors, the key and `state` alone;
    - a NaN or an infinity on any rank makes the result hold one on every rank, and neither `given`
      nor `state` keeps it.
    """

    name: ClassVar[str]
    unbiased: ClassVar[bool] = False

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        """what is carried from step to step (bases, previous factors), by unit; in checkpoints"""

    @abstractmethod
    def sum_scatter(self, given: Tensor, unit: Unit, wire: Wire, key: MessageKey) -> Tensor:
        """The sum over ranks of chunk `wire.rank` of given[world_size * n]: float32 [n].

        Args:
            given: float32, contiguous; overwritten with what was not sent.
            key: its seed, step and unit are the same on all ranks.
        """

    @abstractmethod
    def sum(self, given: Tensor, unit: Unit, wire: Wire, key: MessageKey) -> Tensor:
        """The sum over ranks of given[n]: float32 [n], the same bytes on all ranks."""

    @abstractmethod
    def reset(self) -> None:
        """Forgets `state`."""
