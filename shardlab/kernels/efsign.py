"""Signs with the mean magnitude of their group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (mean magnitude, bfloat16) and codes of
1 bit. An element decodes to the mean, or to minus the mean where its bit is set. Bits and mean:
`shardlab.kernels.signs`.

* A group of zeros has mean 0 and decodes to zeros; in other groups an element of zero decodes to
  the mean, since one bit has no code for zero.
* A group that holds NaN or infinity, or whose magnitudes add up to infinity, has mean NaN: every
  element of it decodes to NaN.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel
from shardlab.kernels.scales import widened
from shardlab.kernels.signs import lane_sums, mean_words


class EfSignFormat(Format):
    """One magnitude per group."""

    name = "efsign"
    head_bytes = 2
    bits = 1

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        sums = lane_sums(rows.abs())
        words = mean_words(sums, torch.full_like(sums, rows.shape[1]))
        return words.view(torch.uint8), (rows < 0).to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        mean = widened(heads.clone().view(torch.int16))
        # a mean of zero has no sign
        return torch.where(codes == 0, mean, 0 - mean)


KERNEL = GroupedKernel(EfSignFormat())
