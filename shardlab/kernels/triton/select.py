"""The k largest magnitudes in Triton: exact radix selection, ties to the lower index.

Magnitudes are compared as bit patterns without the sign, so NaN is above infinity above all finite
numbers. Four histograms of 8 bits each narrow down the smallest pattern that is kept, without any
synchronisation with the host; then blocks count what they keep, and write it in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_BINS = 256


@triton.jit
def _pattern(x, n, position):
    return (
        tl.load(x + position, mask=position < n, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    )


@triton.jit
def _histogram_kernel(x, n, prefix, counts, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Count the 8 bits at SHIFT among the patterns whose bits above are `prefix`."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = _pattern(x, n, position)
    # in two shifts, since a shift by 32 is undefined; bits 31 and up are zero
    alike = (position < n) & ((pattern >> SHIFT) >> 8 == tl.load(prefix))
    digit = (pattern >> SHIFT) & 255
    # patterns with another prefix are counted in a further bin, which is dropped
    found = tl.histogram(tl.where(alike, digit, 256), 512)
    bins = tl.arange(0, 512)
    tl.atomic_add(counts + bins, found, mask=bins < 256)


@triton.jit
def _count_kernel(x, n, smallest, above, equal, BLOCK: tl.constexpr):
    """Count the patterns of each block above the smallest kept one, and those equal to it."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern, limit = _pattern(x, n, position), tl.load(smallest)
    tl.store(above + block, tl.sum(((pattern > limit) & (position < n)).to(tl.int32)))
    tl.store(equal + block, tl.sum(((pattern == limit) & (position < n)).to(tl.int32)))


@triton.jit
def _write_kernel(
    x,
    n,
    smallest,
    wanted,
    above_before,
    equal_before,
    indices,
    values,
    BLOCK: tl.constexpr,
):
    """Write the kept elements of each block after those of the blocks before it."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern, limit, ties = _pattern(x, n, position), tl.load(smallest), tl.load(wanted)
    before = tl.load(equal_before + block)
    equal = ((pattern == limit) & (position < n)).to(tl.int32)
    kept_tie = (equal == 1) & (before + tl.cumsum(equal) <= ties)
    kept = ((pattern > limit) & (position < n)) | kept_tie
    start = tl.load(above_before + block) + tl.minimum(before, ties)
    target = start + tl.cumsum(kept.to(tl.int32)) - 1
    tl.store(indices + target, position.to(tl.int32), mask=kept)
    tl.store(values + target, tl.load(x + position, mask=position < n, other=0.0), mask=kept)


def select(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the indices of the k elements of largest magnitude, ascending, and their values.

    Args:
        x: float32 [n], contiguous.
        k: from 0 to n.

    Returns:
        int32 [k] and float32 [k].
    """
    n, device = x.numel(), x.device
    indices = torch.empty(k, dtype=torch.int32, device=device)
    values = torch.empty(k, dtype=torch.float32, device=device)
    if k == 0:
        return indices, values
    grid = (triton.cdiv(n, _BLOCK),)
    smallest, ties = _smallest_kept(x, k)
    above, equal = torch.empty(2, grid[0], dtype=torch.int32, device=device)
    _count_kernel[grid](x, n, smallest, above, equal, BLOCK=_BLOCK)
    _write_kernel[grid](
        x,
        n,
        smallest,
        ties,
        _before(above),
        _before(equal),
        indices,
        values,
        BLOCK=_BLOCK,
    )
    return indices, values


def _smallest_kept(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k-th largest pattern, and how many equal to it are kept; int32 [1] each."""
    n = x.numel()
    prefix = torch.zeros(1, dtype=torch.int32, device=x.device)
    wanted = torch.full((1,), k, dtype=torch.int32, device=x.device)
    for shift in (24, 16, 8, 0):
        counts = torch.zeros(_BINS, dtype=torch.int32, device=x.device)
        grid = (triton.cdiv(n, _BLOCK),)
        _histogram_kernel[grid](x, n, prefix, counts, SHIFT=shift, BLOCK=_BLOCK)
        from_above = counts.flip(0).cumsum(0, dtype=torch.int32)
        # the highest bin at which enough elements are counted
        position = torch.searchsorted(from_above, wanted)
        seen = torch.where(position > 0, from_above[(position - 1).clamp_min(0)], 0)
        wanted = (wanted - seen).to(torch.int32)
        prefix = (prefix << 8 | (_BINS - 1 - position)).to(torch.int32)
    return prefix, wanted


def _before(counts: Tensor) -> Tensor:
    return (counts.cumsum(0) - counts).to(torch.int32)
