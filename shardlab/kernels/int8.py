"""Eight-bit integers with one scale per group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 8 bits (a
signed integer). An element decodes to `code * scale`, exactly representable in float32.

* scale = (largest magnitude of the group) / 127 in float32, raised to 2**-126 (the smallest normal
  number: no host flushes it to zero), rounded up to bfloat16: no code is clipped.
* code = x times the float32 reciprocal of the scale (one division per group), rounded to the
  nearest integer, ties to even.
* A group of zeros has scale 0 and codes 0.
* A group that holds NaN, infinity or a magnitude of 2**127 and more has scale NaN (0x7FC0) and
  codes 0: every element of it decodes to NaN, which the receiver detects in the sum.

With a residual, what is lost is exactly representable in float32: what is sent and what is kept add
up to what was given.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel

_NOT_FINITE = 0x7FC0
_TOO_LARGE = 2.0**127
_SMALLEST_SCALE = 2.0**-126


class Int8Format(Format):
    """Rounded to the nearest."""

    name = "int8"
    head_bytes = 2
    bits = 8

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        words = scale_words(rows, 127.0)
        scale = widened(words)
        reciprocal = torch.where(scale > 0, scale, 1.0).reciprocal()
        codes = torch.where(scale > 0, rows * reciprocal, 0.0).round()
        return words.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        scale = widened(heads.clone().view(torch.int16))
        return codes.view(torch.int8).to(torch.float32) * scale


def scale_words(rows: Tensor, levels: float, smallest: float = _SMALLEST_SCALE) -> Tensor:
    """The bits of the bfloat16 scales of groups [groups, G], int16 [groups, 1].

    Args:
        levels: what the largest magnitude of a group becomes in units of its scale, at most.
        smallest: no scale but that of zeros is smaller.
    """
    largest = rows.abs().amax(1, keepdim=True)
    # by a tensor: some devices divide by a number through its reciprocal, which rounds twice
    scale = (largest / torch.full_like(largest, levels)).clamp_min(smallest)
    bits = (scale.view(torch.int32) + 0xFFFF) >> 16
    bits = bits.masked_fill(largest == 0, 0).masked_fill(~(largest < _TOO_LARGE), _NOT_FINITE)
    return bits.to(torch.int16)


def widened(words: Tensor) -> Tensor:
    """float32 from the bits of bfloat16, int16."""
    return (words.to(torch.int32) << 16).view(torch.float32)


KERNEL = GroupedKernel(Int8Format())
