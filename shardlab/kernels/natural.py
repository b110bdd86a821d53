"""Stochastic powers of two.

Layout: `shardlab.kernels.grouped`, without heads, codes of 9 bits in groups of 1024: the byte of
exponent is the low part of a code, the sign its highest bit.

* exponent = (bits of |x| + r) >> 23, where r is 23 random bits: the upper ones of the element's
  `shardlab.kernels.random`. A mantissa m carries into the exponent with probability m * 2**-23, so
  |x| becomes the power of two below or above it and stays what it is in the mean. A subnormal
  number becomes 0 or 2**-126 by the same rule.
* NaN, infinity and magnitudes above 2**127 (whose next power of two float32 lacks) have the
  exponent 255.
* An element decodes to the float32 of that sign and exponent with a mantissa of zero: +-0 for 0,
  +-infinity for 255.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel

GROUP = 1024
"""elements whose exponents and signs lie together"""

_LARGEST = 0x7F000000


class NaturalFormat(Format):
    """A power of two on either side of the element."""

    name = "natural"
    head_bytes = 0
    bits = 9
    random = True

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        assert chance is not None
        bits = rows.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        drawn = (magnitude.clamp_max(_LARGEST) + (chance * 2.0**23).to(torch.int32)) >> 23
        codes = drawn.masked_fill(magnitude > _LARGEST, 255) | (bits < 0).to(torch.int32) << 8
        return codes.new_empty(len(rows), 0, dtype=torch.uint8), codes

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        signed = torch.where(codes >= 256, codes - 512, codes).to(torch.int32)
        return ((signed & 0x1FF) << 23).view(torch.float32)


KERNEL = GroupedKernel(NaturalFormat())
