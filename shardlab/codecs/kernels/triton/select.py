"""The kernels of shardlab/codecs/kernels/select.py in Triton: radix selection, ties to the lower index.

Magnitudes are compared as bit patterns without the sign, so NaN is above infinity above all finite
numbers. Four histograms of 8 bits each narrow down the smallest pattern that is kept, without any
synchronisation with the host; then blocks count what they keep, and write it in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import BLOCK
from shardlab.codecs.kernels.triton.numbers import given_at

_BINS = 256


@triton.jit
def _pattern(given):
    return (given.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.uint32)


@triton.jit
def _keep(given, residual, kept, position, n):
    """Write x + residual, or the residual where that is not finite."""
    before = tl.load(residual + position, mask=position < n, other=0.0)
    finite = tl.abs(given) < float("inf")
    tl.store(kept + position, tl.where(finite, given, before), mask=position < n)


@triton.jit
def _at_least_kernel(
    x,
    residual,
    kept,
    counts,
    n,
    floor,
    RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the patterns of each block that are at least `floor`."""
    block = tl.program_id(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = given_at(x, residual, position, position < n, RESIDUAL)
    large = (given.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= floor
    tl.store(counts + block, tl.sum((large & (position < n)).to(tl.int32)))
    if KEEP:
        _keep(given, residual, kept, position, n)


@triton.jit
def _histogram_kernel(
    x, residual, state, counts, n, RESIDUAL: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):
    """Count the 8 bits at SHIFT among the patterns whose bits above are the prefix in `state`."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = _pattern(given_at(x, residual, position, position < n, RESIDUAL))
    prefix = tl.load(state).to(tl.uint32, bitcast=True)
    # in two shifts, since a shift by 32 is undefined; bits 31 and up are zero
    alike = (position < n) & ((pattern >> SHIFT) >> 8 == prefix)
    digit = ((pattern >> SHIFT) & 255).to(tl.int32)
    # patterns with another prefix are counted in a further bin, which is dropped
    found = tl.histogram(tl.where(alike, digit, 256), 512)
    bins = tl.arange(0, 512)
    tl.atomic_add(counts + bins, found, mask=bins < 256)


@triton.jit
def _digit_kernel(state, counts):
    """Append to the prefix the highest digit at which enough elements are counted."""
    prefix, wanted = tl.load(state), tl.load(state + 1)
    found = tl.load(counts + 255 - tl.arange(0, 256))
    higher = (tl.cumsum(found) < wanted).to(tl.int32)
    # of no wanted element the digits are 255: above all patterns
    tl.store(state, prefix << 8 | (255 - tl.sum(higher)))
    tl.store(state + 1, wanted - tl.sum(found * higher))


@triton.jit
def _count_kernel(x, residual, state, counts, n, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr):
    """Count the patterns of each block above the smallest kept one, and those equal to it."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    pattern = _pattern(given_at(x, residual, position, position < n, RESIDUAL))
    limit = tl.load(state).to(tl.uint32, bitcast=True)
    tl.store(counts + block, tl.sum(((pattern > limit) & (position < n)).to(tl.int32)))
    tl.store(counts + blocks + block, tl.sum(((pattern == limit) & (position < n)).to(tl.int32)))


@triton.jit
def _write_kernel(
    x,
    residual,
    kept,
    state,
    stops,
    places,
    values,
    n,
    RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the selected elements of each block after those of the blocks before it."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    position = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    given = given_at(x, residual, position, position < n, RESIDUAL)
    pattern, ties = _pattern(given), tl.load(state + 1)
    limit = tl.load(state).to(tl.uint32, bitcast=True)
    above = ((pattern > limit) & (position < n)).to(tl.int32)
    equal = ((pattern == limit) & (position < n)).to(tl.int32)
    equal_before = tl.load(stops + blocks + block) - tl.sum(equal)
    selected = above + equal * (equal_before + tl.cumsum(equal) <= ties).to(tl.int32)
    start = tl.load(stops + block) - tl.sum(above) + tl.minimum(equal_before, ties)
    target = start + tl.cumsum(selected) - 1
    tl.store(places + target, position.to(tl.int32), mask=selected == 1)
    tl.store(values + target, given, mask=selected == 1)
    if KEEP:
        _keep(given, residual, kept, position, n)


# above a floor, k differs by message: Triton would compile while training
@triton.jit(do_not_specialize=["k"])
def _rest_kernel(
    values, decoded, before, places, kept, k, AT_PLACES: tl.constexpr, BLOCK: tl.constexpr
):
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + number, mask=number < k, other=0)
    value = tl.load(values + number, mask=number < k, other=0.0)
    rest = value - tl.load(decoded + number, mask=number < k, other=0.0)
    old = tl.load(before + (place if AT_PLACES else number), mask=number < k, other=0.0)
    finite = tl.abs(rest) < float("inf")
    tl.store(kept + place, tl.where(finite, rest, old), mask=number < k)


def largest(
    x: Tensor,
    residual: Tensor | None,
    kept: Tensor | None,
    floor: int,
    values: Tensor,
    places: Tensor,
    count: Tensor,
) -> None:
    """Run the operator `select_largest` on the GPU; the host reads the count above a floor."""
    n = x.numel()
    # bits of the smallest selected pattern, and how many elements are still wanted
    state = torch.zeros(2, dtype=torch.int32, device=x.device)
    state[1].fill_(values.numel())
    if floor:
        state[1].clamp_(max=at_least(x, residual, None, floor)[0])
        count.copy_(state[1:])
    else:
        count.fill_(values.numel())
    if not n:
        return
    grid, flags = _launch(x, residual, kept)
    reads = {"RESIDUAL": residual is not None, "BLOCK": BLOCK}
    before, after = _or(residual, x), _or(kept, x)
    for shift in (24, 16, 8, 0):
        bins = torch.zeros(_BINS, dtype=torch.int32, device=x.device)
        _histogram_kernel[grid](x, before, state, bins, n, SHIFT=shift, **reads)
        _digit_kernel[(1,)](state, bins)
    counts = torch.empty(2, *grid, dtype=torch.int32, device=x.device)
    _count_kernel[grid](x, before, state, counts, n, **reads)
    stops = counts.cumsum(1)
    _write_kernel[grid](x, before, after, state, stops, places, values, n, **flags)


def at_least(x: Tensor, residual: Tensor | None, kept: Tensor | None, floor: int) -> Tensor:
    """Count the magnitudes of `x + residual` of at least `floor`, a pattern: int64 [1].

    Args:
        kept: set to `x + residual`, or to `residual` where that is not finite; may be `residual`.
    """
    grid, flags = _launch(x, residual, kept)
    counts = torch.empty(*grid, dtype=torch.int32, device=x.device)
    before, after = _or(residual, x), _or(kept, x)
    _at_least_kernel[grid](x, before, after, counts, x.numel(), floor, **flags)
    return counts.sum(0, keepdim=True)


def keep(
    x: Tensor | None,
    residual: Tensor,
    kept: Tensor,
    places: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Run the operator `select_keep` on the GPU."""
    k, before = places.numel(), residual
    if x is not None:
        before = residual.index_select(0, places)
        at_least(x, residual, kept, 0)
    _rest_kernel[(triton.cdiv(k, BLOCK),)](
        values, decoded, before, places, kept, k, AT_PLACES=x is None, BLOCK=BLOCK
    )


def _launch(
    x: Tensor, residual: Tensor | None, kept: Tensor | None
) -> tuple[tuple[int], dict[str, int]]:
    flags = {"RESIDUAL": residual is not None, "KEEP": kept is not None, "BLOCK": BLOCK}
    return (triton.cdiv(x.numel(), BLOCK),), flags


def _or(vector: Tensor | None, other: Tensor) -> Tensor:
    """Return a vector, or another in the place of one that a kernel does not read."""
    return other if vector is None else vector
