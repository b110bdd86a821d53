"""Gradients of a unit on each rank, laid out as they are scattered or whole."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Block, MessageKey, Unit
from shardlab.codecs.multi_phase import MultiPhaseMethod
from shardlab.codecs.registry import make_method
from shardlab.comm.ledger import Ledger
from shardlab.comm.multi_phase import GroupCommunicator
from tests.comm.wire import gathered

UNIT = Unit(
    "layer",
    (Block("matrix", 37, 40), Block("bias", 13, 1), Block("few", 2, 90), Block("v", 64, 30)),
)
"""two matrices, one of uneven rows for 2, 3 and 4 ranks; a vector; more columns than rows"""


def gradients(rank: int, step: int, unit: Unit = UNIT) -> list[Tensor]:
    """One matrix per block."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(b.rows, b.columns, generator=generator) for b in unit.blocks]


def scattered(matrices: list[Tensor], world_size: int) -> Tensor:
    """Equal chunks, each with ceil(rows / world_size) rows of every matrix, padded with zeros."""
    padded = [torch.nn.functional.pad(m, (0, 0, 0, -len(m) % world_size)) for m in matrices]
    chunks = zip(*(m.chunk(world_size) for m in padded), strict=True)
    return torch.cat([part.flatten() for chunk in chunks for part in chunk])


def whole(matrices: list[Tensor], world_size: int) -> Tensor:
    return torch.cat([m.flatten() for m in matrices])


def joined(result: Tensor, group: dist.ProcessGroup, how: str) -> Tensor:
    """The whole sum from the results of all ranks."""
    results = gathered(result, group)
    assert how != "sum" or all(torch.equal(result, other) for other in results)
    return result if how == "sum" else torch.cat(results)


LAYOUTS: dict[str, Callable[[list[Tensor], int], Tensor]] = {
    "sum_scatter": scattered,
    "sum": whole,
}


def key_of(rank: int, step: int, unit: Unit = UNIT) -> MessageKey:
    return MessageKey(5, step, unit.name, rank)


class Call:
    """One method on one rank, called step by step."""

    def __init__(self, group: dist.ProcessGroup, spec: str, how: str, unit: Unit = UNIT) -> None:
        method = make_method(spec)
        assert isinstance(method, MultiPhaseMethod)
        self.method, self.unit = method, unit
        self.ledger = Ledger()
        self.wire = GroupCommunicator(group, self.ledger, "gradients")
        self._reduce = {"sum": method.all_reduce, "sum_scatter": method.reduce_scatter}[how]
        self._lay_out = LAYOUTS[how]

    def lay_out(self, matrices: list[Tensor]) -> Tensor:
        return self._lay_out(matrices, self.wire.world_size)

    def __call__(self, vector: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """The result, and what was not sent."""
        rest = vector.clone()
        key = key_of(self.wire.rank, step, self.unit)
        return self._reduce(rest, self.unit, self.wire, key), rest
