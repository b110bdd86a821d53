"""Blocks of tokens in an order that depends only on seed and sample index."""

from collections.abc import Iterator

import numpy as np
import torch

from shardlab.core.errors import UserError
from shardlab.data.tokens import Tokens, TokenSplit


class Batches:
    """Training samples: sample g of a seed is the same block at any world size and after a resume.

    Block b holds the tokens `b * sequence_length` to `(b + 1) * sequence_length`, both included.
    Its last token is the first of the next block, so that each token except the first is a target
    once per epoch. The remainder of the split, less than one block, is not trained on. Each epoch
    has a different permutation.

    Args:
        split: Tokens to take blocks from.
        sequence_length: Tokens to predict per block.
        seed: Seed of the permutations, at least 0.

    Raises:
        UserError: The split is shorter than one block.
    """

    def __init__(self, split: TokenSplit, sequence_length: int, seed: int) -> None:
        self._split = split
        self._length = sequence_length
        self._seed = seed
        self.samples_per_epoch = (len(split) - 1) // sequence_length
        if self.samples_per_epoch < 1:
            raise UserError(
                f"the {split.name} split has {len(split)} tokens, fewer than train.sequence_length "
                f"{sequence_length} + 1; lower it, or give more text"
            )
        self._epoch = -1
        self._order = np.empty(0, np.int64)

    def batch(self, first_sample: int, count: int) -> torch.Tensor:
        """Return samples `first_sample` to `first_sample + count - 1` of the infinite sequence.

        Returns:
            int64, shape `[count, sequence_length + 1]`; inputs are `[:, :-1]`, targets `[:, 1:]`.
        """
        blocks = [self._block(sample) for sample in range(first_sample, first_sample + count)]
        width = self._length + 1
        rows = [self._split.read(block * self._length, width) for block in blocks]
        return torch.from_numpy(np.stack(rows))

    def micro_batches(
        self, first_sample: int, rank: int, world_size: int, accumulation: int, batch_size: int
    ) -> list[torch.Tensor]:
        """Return the batches of a rank in a step, one per micro-batch.

        A step takes the next accumulation * world_size * batch_size samples. They are ordered by
        micro-batch, then by rank.
        """
        firsts = first_samples(first_sample, rank, world_size, accumulation, batch_size)
        return [self.batch(first, batch_size) for first in firsts]

    def _block(self, sample: int) -> int:
        epoch, index = divmod(sample, self.samples_per_epoch)
        if epoch != self._epoch:
            # raw Philox numbers, which are stable between versions of NumPy, unlike shuffles
            numbers = np.random.Philox(key=[self._seed, epoch]).random_raw(self.samples_per_epoch)
            self._epoch, self._order = epoch, np.argsort(numbers, kind="stable")
        return int(self._order[index])


def first_samples(
    first_sample: int, rank: int, world_size: int, accumulation: int, batch_size: int
) -> list[int]:
    """Return the first sample of each micro-batch, as `Batches.micro_batches` takes them."""
    return [
        first_sample + (micro * world_size + rank) * batch_size for micro in range(accumulation)
    ]


def blocks(tokens: Tokens, sequence_length: int, batch: int) -> Iterator[torch.Tensor]:
    """Yield all tokens in order, for evaluation: every token except the first is a target once.

    Yields:
        int64 `[rows, sequence_length + 1]` with `rows <= batch`. Blocks share one token as in
        `Batches`. The last tensor is the remainder, `[1, remainder + 1]`, so a mean over targets
        must weigh each tensor by its number of targets.
    """
    full, remainder = divmod(max(len(tokens) - 1, 0), sequence_length)
    for first in range(0, full, batch):
        rows = min(batch, full - first)
        ids = tokens.read(first * sequence_length, rows * sequence_length + 1)
        yield torch.from_numpy(ids).unfold(0, sequence_length + 1, sequence_length)
    if remainder:
        yield torch.from_numpy(tokens.read(full * sequence_length, remainder + 1))[None]
