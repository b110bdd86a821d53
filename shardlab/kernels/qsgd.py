"""Stochastic integers whose scale comes from the Euclidean norm of the group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 2, 4 or 8
bits (signed integers from -s to s, for s = 1, 7 or 127). An element decodes to `code * scale`.

* norm: with 2**e the largest power of two that is not above the largest magnitude (e at least
  -126), the squares of x * 2**-e are summed in the 32 lanes of `shardlab.kernels.signs`; the square
  root of that, times 2**e.
* scale = norm / s in float32 (the root is divided by s, then scaled), raised to 2**-126, rounded
  up to bfloat16.
* code as in stochastic int8. Groups of zeros and groups with something not finite as there.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import GroupedKernel
from shardlab.kernels.integers import TOO_LARGE, IntegerFormat, scale_words
from shardlab.kernels.signs import lane_sums


class _QsgdFormat(IntegerFormat):
    def words(self, rows: Tensor) -> Tensor:
        largest = rows.abs().amax(1, keepdim=True)
        usable = largest < TOO_LARGE
        bounded = torch.where(usable, largest, 1.0).clamp_min(2.0**-126)
        exponent = bounded.view(torch.int32) & 0x7F800000
        down = (0x7F000000 - exponent).view(torch.float32)
        root = lane_sums((torch.where(usable, rows, 0.0) * down).square()).sqrt()
        scale = root / torch.full_like(root, float(self.levels)) * exponent.view(torch.float32)
        return scale_words(torch.where(usable, scale, float("nan")), 1.0)


KERNELS = {
    levels: GroupedKernel(_QsgdFormat(f"qsgd{levels}", bits, levels, stochastic=True))
    for levels, bits in ((1, 2), (7, 4), (127, 8))
}
"""by the number of levels above zero"""
