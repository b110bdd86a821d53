"""Eight-bit floats with one scale per group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 8 bits,
floats of the OCP 8-bit floating point specification (section 5):

    format  largest L  smallest scale  infinity     NaN
    e4m3        448       2**-116      none         0x7F, 0xFF
    e5m2      57344       2**-109      0x7C, 0xFC   0x7D to 0x7F, 0xFD to 0xFF

* scale = (largest magnitude of the group) / L in float32, raised to the smallest scale (so that
  neither a decoded value nor one that is rounded up from zero is subnormal in float32), rounded up
  to bfloat16: no code is clipped.
* code = x times the float32 reciprocal of the scale (one division per group), rounded to the
  nearest, ties to even, subnormal codes included; the sign of zero is kept.
* A group of zeros has scale 0 and codes 0.
* A group that holds NaN, infinity or a magnitude of 2**127 and more has scale NaN (0x7FC0) and
  codes 0: every element of it decodes to NaN, which the receiver detects in the sum.

Codes of infinity and NaN, and those above L, are never sent; what they decode to is undefined.
An element decodes to `code * scale`, exactly representable in float32. With a residual, what is
lost is so too: what is sent and what is kept add up to what was given.
"""

from typing import ClassVar

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel
from shardlab.kernels.scales import scale_words, widened


class _Fp8Format(Format):
    head_bytes = 2
    bits = 8
    dtype: ClassVar[torch.dtype]
    smallest_scale: ClassVar[float]

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        words = scale_words(rows, torch.finfo(self.dtype).max, self.smallest_scale)
        scale = widened(words)
        reciprocal = torch.where(scale > 0, scale, 1.0).reciprocal()
        scaled = torch.where(scale > 0, rows * reciprocal, 0.0)
        return words.view(torch.uint8), scaled.to(self.dtype).view(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        scale = widened(heads.clone().view(torch.int16))
        return codes.view(self.dtype).to(torch.float32) * scale


class E4m3Format(_Fp8Format):
    """Rounded to 4 bits of exponent and 3 of mantissa."""

    name = "e4m3"
    dtype = torch.float8_e4m3fn
    smallest_scale = 2.0**-116


class E5m2Format(_Fp8Format):
    """Rounded to 5 bits of exponent and 2 of mantissa."""

    name = "e5m2"
    dtype = torch.float8_e5m2
    smallest_scale = 2.0**-109


KERNELS = {format.name: GroupedKernel(format) for format in (E4m3Format(), E5m2Format())}
"""by format"""
