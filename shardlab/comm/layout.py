"""Order of the elements of units in messages, and names of units that are sent apart."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.unit import Block, Unit

LAYOUT = "layout:"
"""prefix of layouts in the state of error feedback; parts begin with units, which have no colon"""
REPLICAS = "@replicas"
"""suffix of units that are summed over the replicas of a two-dimensional mesh"""
ACROSS = "@nodes"
"""suffix of units at the second level of `shardlab.comm.hierarchy`"""


class Layout(NamedTuple):
    """Order of the elements of a unit in a message of a given world size.

    `scattered`: as `shardlab.codecs.unit.Unit` defines it, rows over the ranks, block by block;
    otherwise one vector that is padded at its end to a multiple of the world size.
    """

    world_size: int
    scattered: bool
    shapes: tuple[tuple[int, int], ...]
    """rows and columns of each block"""
    ranks_per_node: int = 0
    """of two levels, whose residuals lie in the order of `shardlab.comm.hierarchy`; 0 for one"""

    @classmethod
    def scattering(cls, unit: Unit, world_size: int, n: int) -> "Layout":
        """Return the layout of vector[world_size * n], scattered; without blocks one of n rows."""
        blocks = unit.blocks or (Block(unit.name, world_size * n, 1),)
        return cls(world_size, True, tuple((b.rows, b.columns) for b in blocks))

    @classmethod
    def whole(cls, world_size: int, n: int) -> "Layout":
        """Return the layout of vector[n] that is summed whole."""
        return cls(world_size, False, ((n, 1),))

    def tensor(self) -> Tensor:
        """Return int64 [3 + 2 * blocks], for a state."""
        numbers = [self.world_size, int(self.scattered), self.ranks_per_node]
        return torch.tensor([*numbers, *(x for shape in self.shapes for x in shape)])

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        """Return the layout from its `tensor()`."""
        world_size, scattered, ranks_per_node, *rest = tensor.tolist()
        shapes = tuple(zip(rest[::2], rest[1::2], strict=True))
        return cls(world_size, bool(scattered), shapes, ranks_per_node)

    def describe(self) -> str:
        """Return a phrase for messages."""
        elements = sum(rows * columns for rows, columns in self.shapes)
        nodes = f" in nodes of {self.ranks_per_node}" if self.ranks_per_node else ""
        return f"{elements} elements in {len(self.shapes)} blocks on {self.world_size} ranks{nodes}"

    def blocks_of(self, chunks: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks [rows, columns] without padding, from the chunks of all ranks."""
        widths = [-(-rows // self.world_size) * columns for rows, columns in self.shapes]
        pieces = torch.stack(list(chunks)).split(widths, 1)
        return [
            piece.reshape(-1, columns)[:rows]
            for piece, (rows, columns) in zip(pieces, self.shapes, strict=True)
        ]

    def chunks_of(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """Return the chunk of each rank, padded with zeros, from the blocks [rows, columns]."""
        size = self.world_size
        pieces = [
            torch.nn.functional.pad(block, (0, 0, 0, -len(block) % size)).reshape(size, -1)
            for block in blocks
        ]
        return list(torch.cat(pieces, 1))
