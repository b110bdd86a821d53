"""The eight-bit dynamic tree data type of Dettmers 2016 with one scale per group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 8 bits: a
sign, d zeros, an indicator bit of one, and the 6 - d bits of a linear fraction. With n =
2**(6 - d), fraction i stands for the middle of its part of the decade,

    +-(0.1 + 0.9 * (i + 1/2) / n) * 10**-d,    code n + i, and 128 more if negative.

Code 0 is 0; code 128, a sign alone, is 1. These are the 256 levels of bitsandbytes' signed map,
rounded to float32. An element decodes to level * scale, rounded to float32.

* scale = the largest magnitude of the group, raised to 2**-104 (no product is subnormal), rounded
  up to bfloat16.
* The nearest level is found in float32 from t = |x| * (64 / scale). Decade d begins half-way from
  the last level of the one below, at 6.4 * (1 + 1.8 / n) * 10**-d; the code is t * 5**d / 0.9 +
  n * 8/9, rounded down, at most 2 n - 1. Below half the smallest level it is 0; for positive x it
  is 128 from half-way to 1. A tie goes to the larger magnitude.
* A group of zeros has scale 0 and codes 0.
* A group that holds NaN, infinity or a magnitude of 2**127 and more has scale NaN (0x7FC0) and
  codes 0: every element of it decodes to NaN, which the receiver detects in the sum.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel
from shardlab.kernels.scales import scale_words, widened

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


class Dynamic8Format(Format):
    """Rounded to the nearest level."""

    name = "dynamic8"
    head_bytes = 2
    bits = 8

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
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
        place = magnitude * slope + n * n.new_tensor(8 / 9)
        code = torch.minimum(place, 2 * n - 0.5).to(torch.int32)
        positive = torch.where(magnitude >= magnitude.new_tensor(_ONE), 128, code)
        both = torch.where(scaled < 0, code + 128, positive)
        both = both.masked_fill(magnitude < magnitude.new_tensor(_ZERO), 0)
        return words.view(torch.uint8), both.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        scale = widened(heads.clone().view(torch.int16))
        return torch.tensor(LEVELS, device=codes.device)[codes.long()] * scale


KERNEL = GroupedKernel(Dynamic8Format())
