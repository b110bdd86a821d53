"""Signs with two means per group.

Layout: `shardlab.kernels.grouped`, with a head of 4 bytes (mean of the elements that are not below
zero, then mean of those below, bfloat16) and codes of 1 bit, which choose the first or the second
mean. Bits and means: `shardlab.kernels.signs`; the mean of no elements is 0.

* A group of zeros has means 0 and decodes to zeros; in other groups zeros count among the elements
  that are not below zero and decode to their mean.
* A group that holds NaN or infinity, or one of whose sums is infinite, has two means NaN: every
  element of it decodes to NaN.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel
from shardlab.kernels.scales import widened
from shardlab.kernels.signs import NOT_FINITE, lane_sums, mean_words


class OneBitFormat(Format):
    """Two means per group."""

    name = "onebit"
    head_bytes = 4
    bits = 1

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        below = rows < 0
        words = torch.cat([_mean(rows, ~below), _mean(rows, below)], 1)
        finite = widened(words).isfinite().all(1, keepdim=True)
        words = torch.where(finite, words, NOT_FINITE)
        return words.view(torch.uint8), below.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        others, below = widened(heads.clone().view(torch.int16)).split(1, 1)
        return torch.where(codes == 0, others, below)


def _mean(rows: Tensor, chosen: Tensor) -> Tensor:
    counts = chosen.sum(1, keepdim=True).to(torch.float32)
    return mean_words(lane_sums(torch.where(chosen, rows, 0.0)), counts)


KERNEL = GroupedKernel(OneBitFormat())
