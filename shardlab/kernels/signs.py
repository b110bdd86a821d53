"""What the one-bit formats share: signs, and means that are summed in a fixed order.

The bit of an element is set if it is below zero: zeros of either sign and NaN count as positive.

A sum over a group runs in 32 lanes: lane l adds elements l, l + 32, l + 64, ... in this order,
starting at zero; then the upper half of the lanes is added to the lower half, until one is left.
All in float32, so every instruction set and device finds the same bits. A mean is the sum divided
by the number of elements, rounded to bfloat16 (to nearest, ties to even): 0 where its magnitude is
below 2**-126 (hosts that flush subnormals must decode the same values) or where there are no
elements, NaN (0x7FC0) where it is not finite or too large for bfloat16.
"""

import torch
from torch import Tensor

_LANES = 32
NOT_FINITE = 0x7FC0
"""a bfloat16 NaN"""
_SMALLEST_MEAN = 2.0**-126


def lane_sums(rows: Tensor) -> Tensor:
    """The sum of each row, in the order above: float32 [groups, 1] from [groups, G]."""
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _LANES))
    lanes = torch.zeros(len(rows), _LANES, device=rows.device)
    for part in padded.view(len(rows), padded.shape[1] // _LANES, _LANES).unbind(1):
        lanes += part
    while lanes.shape[1] > 1:
        lower, upper = lanes.chunk(2, 1)
        lanes = lower + upper
    return lanes


def mean_words(sums: Tensor, counts: Tensor) -> Tensor:
    """The bits of the bfloat16 means, int16, of sums of `counts` elements (float32)."""
    means = sums / counts.clamp_min(1.0)
    rounded = means.to(torch.bfloat16)
    words = rounded.view(torch.int16).masked_fill(means.abs() < _SMALLEST_MEAN, 0)
    return words.masked_fill(~rounded.isfinite(), NOT_FINITE)
