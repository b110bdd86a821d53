"""Shorter floats without a scale.

Layout: `shardlab.kernels.grouped`, without heads, codes of 16 bits.

bfloat16, the upper half of float32, rounded:
* to the nearest, ties to even; magnitudes above the largest bfloat16 become infinity;
* NaN stays NaN: its sign and upper payload bits are kept, the quiet bit is set.

float16 of IEEE 754, rounded:
* to the nearest, ties to even, subnormal numbers included; a finite magnitude above 65504 becomes
  65504: nothing that was a number stops being one, and the rest is in the residual;
* infinity stays infinity, NaN stays NaN as above.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel

GROUP = 1024
"""elements that the kernels take at a time; nothing of it is seen in a payload"""
LARGEST_FP16 = 65504.0
"""finite float16"""


class Bf16Format(Format):
    """float32 rounded to bfloat16."""

    name = "bf16"
    head_bytes = 0
    bits = 16

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        # PyTorch's own NaN differs between its vector and scalar code
        quiet = ((rows.view(torch.int32) >> 16) | 0x0040).to(torch.int16)
        codes = torch.where(rows.isnan(), quiet, rows.to(torch.bfloat16).view(torch.int16))
        return codes.new_empty(len(rows), 0, dtype=torch.uint8), codes

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return codes.view(torch.bfloat16).to(torch.float32)


class Fp16Format(Format):
    """float32 rounded to float16."""

    name = "fp16"
    head_bytes = 0
    bits = 16

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        bits = rows.view(torch.int32)
        quiet = (((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x03FF)).to(torch.int16)
        finite = torch.where(rows.isinf(), rows, rows.clamp(-LARGEST_FP16, LARGEST_FP16))
        codes = torch.where(rows.isnan(), quiet, finite.to(torch.float16).view(torch.int16))
        return codes.new_empty(len(rows), 0, dtype=torch.uint8), codes

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return codes.view(torch.float16).to(torch.float32)


BF16 = GroupedKernel(Bf16Format())
FP16 = GroupedKernel(Fp16Format())
