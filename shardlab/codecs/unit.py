"""Units: the parameters of a message, block by block."""

from typing import NamedTuple


class Block(NamedTuple):
    """One parameter of a unit, as a matrix of its first dimension by all others."""

    name: str
    rows: int
    columns: int


class Unit(NamedTuple):
    """Name and blocks of a message; the same on all ranks and in all steps.

    Blocks are consecutive. In a vector that is to be scattered over W ranks each of the W equal
    chunks holds ceil(rows / W) rows of each block, padded with zeros at the end (the layout of
    gradients in `torch.distributed.fsdp.fully_shard`); in a vector that is not scattered every
    block is whole. Without blocks only the length is known.
    """

    name: str
    blocks: tuple[Block, ...] = ()

    def chunk_sizes(self, world_size: int) -> list[int]:
        """Return the elements of each block in one chunk."""
        return [-(-block.rows // world_size) * block.columns for block in self.blocks]
