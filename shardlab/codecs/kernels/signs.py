"""One bit per element with means of the group: `efsign` and `onebit`.

The bit of an element is set if it is below zero: zeros of either sign and NaN count as positive.

A sum over a group runs in 32 lanes: lane l adds elements l, l + 32, l + 64, ... in this order,
starting at zero; then the upper half of the lanes is added to the lower half, until one is left.
All in float32, so every instruction set and device finds the same bits. A mean is the sum divided
by the number of elements, rounded to bfloat16 (to nearest, ties to even): 0 where its magnitude is
below 2**-126 (hosts that flush subnormals must decode the same values) or where there are no
elements, NaN (0x7FC0) where it is not finite or too large for bfloat16.

Layout: `shardlab.codecs.kernels.grouped`, with codes of 1 bit. A group of zeros decodes to zeros; in
other groups zeros decode to the mean of the elements that are not below zero, since one bit has no
code for zero. A group that holds NaN or infinity, or with an infinite sum, decodes to NaN.

* `efsign`: a head of 2 bytes, the mean magnitude. An element decodes to the mean, or to minus the
  mean where its bit is set.
* `onebit`: a head of 4 bytes, the mean of the elements that are not below zero, then the mean of
  those below; NaN both if one is. The bit chooses the first or the second mean.
"""

import torch
from torch import Tensor

from shardlab.codecs.kernels.grouped import Format, GroupedKernel
from shardlab.codecs.kernels.scales import NOT_FINITE, read_scales, widened

_LANES = 32
_SMALLEST_MEAN = 2.0**-126


def lane_sums(rows: Tensor) -> Tensor:
    """Return the sum of each row, in the order above: float32 [groups, 1] from [groups, G]."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _LANES))
    lanes = torch.zeros(len(rows), _LANES, device=rows.device)
    for part in padded.view(len(rows), padded.shape[1] // _LANES, _LANES).unbind(1):
        lanes += part
    while lanes.shape[1] > 1:
        lower, upper = lanes.chunk(2, 1)
        lanes = lower + upper
    return lanes


def _mean_words(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the bits of the bfloat16 means, int16, of sums of `counts` elements (float32)."""
    means = sums / counts.clamp_min(1.0)
    rounded = means.to(torch.bfloat16)
    words = rounded.view(torch.int16).masked_fill(means.abs() < _SMALLEST_MEAN, 0)
    return words.masked_fill(~rounded.isfinite(), NOT_FINITE)


class _EfSign(Format):
    name = "efsign"
    head_bytes = 2
    bits = 1

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        sums = lane_sums(rows.abs())
        words = _mean_words(sums, torch.full_like(sums, rows.shape[1]))
        return words.view(torch.uint8), (rows < 0).to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        mean = read_scales(heads)
        # a mean of zero has no sign
        return torch.where(codes == 0, mean, 0 - mean)


class _OneBit(Format):
    name = "onebit"
    head_bytes = 4
    bits = 1

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        below = rows < 0
        means = [
            _mean_words(
                lane_sums(torch.where(chosen, rows, 0.0)),
                chosen.sum(1, keepdim=True).to(torch.float32),
            )
            for chosen in (~below, below)
        ]
        words = torch.cat(means, 1)
        finite = widened(words).isfinite().all(1, keepdim=True)
        words = torch.where(finite, words, NOT_FINITE)
        return words.view(torch.uint8), below.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        others, below = read_scales(heads).split(1, 1)
        return torch.where(codes == 0, others, below)


KERNELS = {format.name: GroupedKernel(format) for format in (_EfSign(), _OneBit())}
"""by format"""
