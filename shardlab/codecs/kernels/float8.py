"""Eight-bit floats with one scale per group: `e4m3`, `e5m2`, and the dynamic tree `dynamic8`.

Layout: `shardlab.codecs.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 8 bits.
Of all three:
* A group of zeros has scale 0 and codes 0.
* A group that holds NaN, infinity or a magnitude of 2**127 and more has scale NaN (0x7FC0) and
  codes 0: every element of it decodes to NaN, which the receiver detects in the sum.

e4m3 and e5m2: floats of the OCP 8-bit floating point specification (section 5):

    format  largest L  smallest scale  infinity     NaN
    e4m3        448       2**-116      none         0x7F, 0xFF
    e5m2      57344       2**-109      0x7C, 0xFC   0x7D to 0x7F, 0xFD to 0xFF

* scale = (largest magnitude of the group) / L in float32, raised to the smallest scale (so that
  neither a decoded value nor one that is rounded up from zero is subnormal in float32), rounded up
  to bfloat16: no code is clipped.
* code = x times the float32 reciprocal of the scale (one division per group), rounded to the
  nearest, ties to even, subnormal codes included; the sign of zero is kept.

Codes of infinity and NaN, and those above L, are never sent; what they decode to is undefined.
An element decodes to `code * scale`, exactly representable in float32. With a residual, what is
lost is so too: sent and kept add up to the input.

dynamic8: the data type of Dettmers 2016. A code is a sign, d zeros, an indicator bit of one, and
the 6 - d bits of a linear fraction. With n = 2**(6 - d), fraction i stands for the middle of its
part of the decade,

    +-(0.1 + 0.9 * (i + 1/2) / n) * 10**-d,    code n + i, and 128 more if negative.

Code 0 is 0; code 128, a sign alone, is 1. These are the 256 levels of bitsandbytes' signed map,
rounded to float32. An element decodes to level * scale, rounded to float32.

* scale = the largest magnitude of the group, raised to 2**-104 (no product is subnormal), rounded
  up to bfloat16.
* The nearest level is found in float32 from t = |x| * (64 / scale). Decade d begins half-way from
  the last level of the one below, at 6.4 * (1 + 1.8 / n) * 10**-d; the code is t * 5**d / 0.9 +
  n * 8/9, rounded down, at most 2 n - 1. Below half the smallest level it is 0; for positive x it
  is 128 from half-way to 1. A tie goes to the larger magnitude.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.codecs.kernels.grouped import Format, GroupedKernel
from shardlab.codecs.kernels.scales import read_scales, scale_words, widened

_DECADES = [(d, 64 >> d) for d in range(7)]
_POSITIVE = [
    (2 * n + 9 * (2 * i + 1)) / (2 * n * 10 ** (d + 1))
    for d, n in reversed(_DECADES)
    for i in range(n)
]
LEVELS = [0.0, *_POSITIVE, 1.0, *(-level for level in _POSITIVE)]
"""by code, in units of the scale"""
_SMALLEST_SCALE = 2.0**-104
_ZERO, _ONE = 64 * 2.75e-7, 63.775


@dataclass(frozen=True)
class _Fp8(Format):
    name: str
    dtype: torch.dtype
    smallest_scale: float
    head_bytes = 2
    bits = 8

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        words = scale_words(rows, torch.finfo(self.dtype).max, self.smallest_scale)
        scale = widened(words)
        reciprocal = torch.where(scale > 0, scale, 1.0).reciprocal()
        scaled = torch.where(scale > 0, rows * reciprocal, 0.0)
        return words.view(torch.uint8), scaled.to(self.dtype).view(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        return codes.view(self.dtype).to(torch.float32) * read_scales(heads)


class _Dynamic8(Format):
    name = "dynamic8"
    head_bytes = 2
    bits = 8

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        words = scale_words(rows, 1.0, _SMALLEST_SCALE)
        scale = widened(words)
        usable = torch.where(scale > 0, scale, 1.0)
        # by a tensor: some devices divide by a number through its reciprocal, which rounds twice
        scaled = torch.where(scale > 0, rows * (torch.full_like(usable, 64.0) / usable), 0.0)
        magnitude = scaled.abs()
        slope, n = magnitude.new_tensor(5.0**6 / 0.9), magnitude.new_tensor(1.0)
        for decade, width in reversed(_DECADES[:6]):
            begin = magnitude.new_tensor(6.4 * (1 + 1.8 / width) * 10.0**-decade)
            slope = torch.where(magnitude >= begin, slope.new_tensor(5.0**decade / 0.9), slope)
            n = torch.where(magnitude >= begin, float(width), n)
        position = magnitude * slope + n * n.new_tensor(8 / 9)
        code = torch.minimum(position, 2 * n - 0.5).to(torch.int32)
        positive = torch.where(magnitude >= magnitude.new_tensor(_ONE), 128, code)
        both = torch.where(scaled < 0, code + 128, positive)
        both = both.masked_fill(magnitude < magnitude.new_tensor(_ZERO), 0)
        return words.view(torch.uint8), both.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        return torch.tensor(LEVELS, device=codes.device)[codes.long()] * read_scales(heads)


_FORMATS: tuple[Format, ...] = (
    _Fp8("e4m3", torch.float8_e4m3fn, 2.0**-116),
    _Fp8("e5m2", torch.float8_e5m2, 2.0**-109),
    _Dynamic8(),
)
KERNELS = {format.name: GroupedKernel(format) for format in _FORMATS}
"""by format"""
