"""Float32 arithmetic with the same bits on every device."""

import torch
from torch import Tensor


def lane_sums(rows: Tensor, lanes: int) -> Tensor:
    """Return the sum of each row, [groups, 1] from [groups, G], with the same bits on all devices.

    Lane l adds the elements l, l + lanes, l + 2 * lanes, ... in this order, starting at zero. Then
    the upper half of the lanes is added to the lower half, until there is one lane.
    """
    parts = max(1, -(-rows.shape[1] // lanes))  # empty rows have one part, of zeros
    padded = torch.nn.functional.pad(rows, (0, parts * lanes - rows.shape[1]))
    sums = padded.new_zeros(len(rows), lanes)
    for part in padded.split(lanes, 1):
        sums = sums + part
    while sums.shape[1] > 1:
        lower, upper = sums.chunk(2, 1)
        sums = lower + upper
    return sums


def square_root(values: Tensor) -> Tensor:
    """Return the correctly rounded root, which PyTorch does not return on some processors."""
    return values.double().sqrt().float()
