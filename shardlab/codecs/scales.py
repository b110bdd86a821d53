"""bfloat16 scales of groups: their values and their bits in a payload.

A scale is the magnitude that the largest code stands for, divided by that code in float32. It is at
least 2**-126, the smallest normal number, which no host flushes to zero, and is rounded up to
bfloat16 so that no code is clipped. A group of zeros has scale 0. A group that holds NaN, infinity
or a magnitude that would overflow in decoding has scale NaN (0x7FC0). All its elements decode to
NaN, which the receiver detects in the sum.
"""

import torch
from torch import Tensor

from shardlab.kernels.arithmetic import lane_sums, square_root

NOT_FINITE = 0x7FC0
"""Bits of the NaN scale."""
TOO_LARGE = 2.0**127
"""Smallest magnitude that would overflow in decoding."""
NORM_TOO_LARGE = 2.0**120
"""Smallest magnitude that counts as not finite where the scale comes from a norm."""
_SMALLEST_SCALE = 2.0**-126


def scale_words(rows: Tensor, levels: float, smallest: float = _SMALLEST_SCALE) -> Tensor:
    """Return the bits of the scales that make the largest magnitude the code `levels`.

    Args:
        rows: float32 [groups, G].
        smallest: Smallest scale of a group that is not zero.

    Returns:
        bits of bfloat16, int16 [groups, 1].
    """
    largest = rows.abs().amax(1, keepdim=True)
    return _words(largest, _divided(largest, levels).clamp_min(smallest), TOO_LARGE)


def signed_scale_words(rows: Tensor, levels: float) -> Tensor:
    """Return the bits of signed scales that give the element of largest magnitude code -levels.

    The sign is negative if that element is positive. Otherwise as `scale_words`.
    """
    words = scale_words(rows, levels)
    flip = (rows.amax(1, keepdim=True) == rows.abs().amax(1, keepdim=True)) & (words != 0)
    return torch.where(flip & (words != NOT_FINITE), words | -0x8000, words)


def norm_words(rows: Tensor, levels: float) -> Tensor:
    """Return the bits of the scales that make the Euclidean norm of a group the code `levels`.

    Squares are summed in sixteen lanes (`lane_sums`). If a sum is not between 2**-60 and 2**100,
    the elements are first scaled by a power of two to about 1. Groups with magnitudes of 2**120 and
    more count as not finite.
    """
    largest = rows.abs().amax(1, keepdim=True)
    sums = lane_sums(rows * rows, 16)
    exponent = (largest.view(torch.int32) >> 23).clamp(1, 253)
    down, up = ((power << 23).view(torch.float32) for power in (254 - exponent, exponent))
    rescaled = _divided(square_root(lane_sums((rows * down).square(), 16)), levels) * up
    in_range = (sums >= 2.0**-60) & (sums < 2.0**100)
    scale = torch.where(in_range, _divided(square_root(sums), levels), rescaled)
    return _words(largest, scale, NORM_TOO_LARGE)


def widened(words: Tensor) -> Tensor:
    """Return bfloat16, given as bits in int16, as float32."""
    return (words.to(torch.int32) << 16).view(torch.float32)


def read_scales(heads: Tensor) -> Tensor:
    """Return the float32 scales [groups, count] in heads, uint8 [groups, 2 * count]."""
    # byte by byte: slices of larger messages may start at odd addresses, and a broadcast view as
    # int16 reads other groups' scales where Inductor (torch 2.13, CPU) compiles it
    low, high = heads.to(torch.int32).view(len(heads), heads.shape[1] // 2, 2).unbind(2)
    return (low << 16 | high << 24).view(torch.float32)


def head_bytes(words: Tensor) -> Tensor:
    """Return uint8 [groups, 2 * count], little endian, from int16 [groups, count]."""
    # byte by byte: Inductor of torch 2.11 refuses some views of one column, which splits a kernel
    return torch.stack([words & 0xFF, words >> 8 & 0xFF], 2).flatten(1).to(torch.uint8)


def _words(largest: Tensor, scale: Tensor, limit: float) -> Tensor:
    bits = (scale.clamp_min(_SMALLEST_SCALE).view(torch.int32) + 0xFFFF) >> 16
    bits = bits.masked_fill(largest == 0, 0).masked_fill(~(largest < limit), NOT_FINITE)
    return bits.to(torch.int16)


def _divided(values: Tensor, levels: float) -> Tensor:
    # by a tensor: some devices divide by a number through its reciprocal, which rounds twice.
    # Inductor does the same with this tensor, so scales of compiled code may differ by one step
    return values / torch.full_like(values, levels)
