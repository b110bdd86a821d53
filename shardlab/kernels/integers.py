"""Integers with one bfloat16 scale per group: what int8, int4 and qsgd have in common."""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format

_NOT_FINITE = 0x7FC0
TOO_LARGE = 2.0**127
"""smallest magnitude that makes the scale NaN"""
SMALLEST_SCALE = 2.0**-126


class IntegerFormat(Format):
    """code = x / scale as an integer from -levels to levels; the largest magnitude has `levels`.

    Args:
        bits: of a code, two's complement.
        stochastic: rounded up or down at random, so that the mean is exact.
    """

    head_bytes = 2

    def __init__(self, name: str, bits: int, levels: int, stochastic: bool = False) -> None:
        self.name = name
        self.bits = bits
        self.random = stochastic
        self.levels = levels

    def words(self, rows: Tensor) -> Tensor:
        """The bits of the bfloat16 scales of groups [groups, G], int16 [groups, 1]."""
        return scale_words(rows, float(self.levels))

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        words = self.words(rows)
        scale = widened(words)
        usable = scale.abs() > 0
        exact = rows * torch.where(usable, scale, 1.0).reciprocal()
        if chance is None:
            codes = (exact if self.bits == 8 else exact.clamp_max(self.levels)).round()
        else:
            within = exact.clamp(-self.levels, self.levels)
            codes = within.floor()
            codes += chance < within - codes
        codes = torch.where(usable, codes, 0.0).to(torch.int8).view(torch.uint8)
        return words.view(torch.uint8), codes & (2**self.bits - 1)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        scale = widened(heads.clone().view(torch.int16))
        shift = 8 - self.bits
        return ((codes << shift).view(torch.int8) >> shift).to(torch.float32) * scale


def scale_words(rows: Tensor, levels: float, smallest: float = SMALLEST_SCALE) -> Tensor:
    """The bits of the bfloat16 scales of groups [groups, G], int16 [groups, 1].

    Args:
        levels: what the largest magnitude of a group becomes in units of its scale, at most.
        smallest: no scale but that of zeros is smaller.
    """
    largest = rows.abs().amax(1, keepdim=True)
    # by a tensor: some devices divide by a number through its reciprocal, which rounds twice
    scale = (largest / torch.full_like(largest, levels)).clamp_min(smallest)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16
    bits = bits.masked_fill(largest == 0, 0).masked_fill(~(largest < TOO_LARGE), _NOT_FINITE)
    return bits.to(torch.int16)


def widened(words: Tensor) -> Tensor:
    """float32 from the bits of bfloat16, int16."""
    return (words.to(torch.int32) << 16).view(torch.float32)
