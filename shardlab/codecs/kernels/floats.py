"""Shorter floats without a scale: `bf16`, `fp16`, and the stochastic powers of two of `natural`.

Layout: `shardlab.codecs.kernels.grouped`, without heads; codes of 16 bits, of `natural` 9 bits.

bfloat16, the upper half of float32, rounded:
* to the nearest, ties to even; magnitudes above the largest bfloat16 become infinity;
* NaN stays NaN: its sign and upper payload bits are kept, the quiet bit is set.

float16 of IEEE 754, rounded:
* to the nearest, ties to even, subnormal numbers included; a finite magnitude above 65504 becomes
  65504: finite numbers stay finite, and the rest is in the residual;
* infinity stays infinity, NaN stays NaN as above.

natural: the byte of the exponent is the low part of a code, the sign its highest bit.
* exponent = (bits of |x| + r) >> 23, where r is 23 random bits: the upper ones of the element's
  `shardlab.codecs.kernels.random`. A mantissa m carries into the exponent with probability m * 2**-23, so
  |x| becomes the power of two below or above it, unbiased. A subnormal number becomes 0 or 2**-126
  by the same rule.
* NaN, infinity and magnitudes above 2**127 (whose next power of two float32 lacks) have the
  exponent 255.
* An element decodes to the float32 of that sign and exponent with a mantissa of zero: +-0 for 0,
  +-infinity for 255.
"""

import torch
from torch import Tensor

from shardlab.codecs.kernels.grouped import Format, GroupedKernel

GROUP = 1024
"""elements of a group: of `natural` those whose exponents and signs are stored together, of the
others those that the kernels take at a time, which no payload shows"""
LARGEST_FP16 = 65504.0
"""finite float16"""
_LARGEST_POWER = 0x7F000000


class _Bf16(Format):
    name = "bf16"
    head_bytes = 0
    bits = 16

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        # PyTorch's own NaN differs between its vector and scalar code
        quiet = ((rows.view(torch.int32) >> 16) | 0x0040).to(torch.int16)
        return _no_heads(rows), torch.where(
            rows.isnan(), quiet, rows.to(torch.bfloat16).view(torch.int16)
        )

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        return codes.view(torch.bfloat16).to(torch.float32)


class _Fp16(Format):
    name = "fp16"
    head_bytes = 0
    bits = 16

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        bits = rows.view(torch.int32)
        quiet = (((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x03FF)).to(torch.int16)
        finite = torch.where(rows.isinf(), rows, rows.clamp(-LARGEST_FP16, LARGEST_FP16))
        return _no_heads(rows), torch.where(
            rows.isnan(), quiet, finite.to(torch.float16).view(torch.int16)
        )

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        return codes.view(torch.float16).to(torch.float32)


class _Natural(Format):
    name = "natural"
    head_bytes = 0
    bits = 9
    random = True

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        assert chance is not None
        bits = rows.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        drawn = (magnitude.clamp_max(_LARGEST_POWER) + (chance * 2.0**23).to(torch.int32)) >> 23
        exponents = drawn.masked_fill(magnitude > _LARGEST_POWER, 255)
        return _no_heads(rows), exponents | (bits < 0).to(torch.int32) << 8

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        signed = torch.where(codes >= 256, codes - 512, codes).to(torch.int32)
        return ((signed & 0x1FF) << 23).view(torch.float32)


def _no_heads(rows: Tensor) -> Tensor:
    return rows.new_empty(len(rows), 0, dtype=torch.uint8)


KERNELS = {format.name: GroupedKernel(format) for format in (_Bf16(), _Fp16(), _Natural())}
"""by format"""
