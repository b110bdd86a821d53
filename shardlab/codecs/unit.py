"""What a message is made of: the unit of the model that it belongs to, block by block."""

from typing import NamedTuple


class Block(NamedTuple):
    """One parameter of a unit, as a matrix of its first dimension by all others."""

    name: str
    rows: int
    columns: int


class Unit(NamedTuple):
    """Names a message and says what it holds; the same on all ranks and in all steps.

    Blocks lie one after another. In a vector that is to be scattered over W ranks every one of the
    W equal chunks holds ceil(rows / W) rows of each block, padded with zeros where rows run out (so
    lays `torch.distributed.fsdp.fully_shard` gradients out); in a vector that is not scattered
    every block is whole. No blocks: nothing is known but the length.
    """

    name: str
    blocks: tuple[Block, ...] = ()

    def chunk_sizes(self, world_size: int) -> list[int]:
        """Elements of each block in one chunk."""
        return [-(-block.rows // world_size) * block.columns for block in self.blocks]
