"""The codings of shardlab/kernels/indices.py in Triton.

Programs count what they write or find, sums of the counts tell where each begins, and a second
launch writes. Sizes differ by message, so no kernel is specialised for them: Triton would compile
while training.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardlab.kernels.triton.launch import BLOCK


@triton.jit
def _gaps(places, k, number):
    """Return the gap before each position, and its length in bytes: 0 beyond k."""
    inside = number < k
    place = tl.load(places + number, mask=inside, other=0)
    gap = place - tl.load(places + number - 1, mask=inside & (number > 0), other=-1) - 1
    length = 1 + (gap >= 1 << 7).to(tl.int32) + (gap >= 1 << 14).to(tl.int32)
    length += (gap >= 1 << 21).to(tl.int32) + (gap >= 1 << 28).to(tl.int32)
    return gap, tl.where(inside, length, 0)


@triton.jit(do_not_specialize=["k"])
def _length_kernel(places, lengths, k, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    _, length = _gaps(places, k, block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    tl.store(lengths + block, tl.sum(length))


@triton.jit(do_not_specialize=["k"])
def _varint_kernel(places, stops, codes, k, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    gap, length = _gaps(places, k, block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK))
    start = tl.load(stops + block) - tl.sum(length)
    target = codes + start + tl.cumsum(length) - length
    for byte in tl.static_range(5):
        more = (length > byte + 1).to(tl.int32) << 7
        tl.store(target + byte, (gap >> 7 * byte & 0x7F | more).to(tl.uint8), mask=length > byte)


@triton.jit(do_not_specialize=["k"])
def _bitmap_kernel(places, codes, k, BLOCK: tl.constexpr):
    """Write each byte with a bit, by the program of its first position."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(places + number, mask=number < k, other=0) >> 3
    before = tl.load(places + number - 1, mask=(number < k) & (number > 0), other=-1) >> 3
    packed = tl.zeros([BLOCK], tl.int32)
    for further in tl.static_range(8):
        place = tl.load(places + number + further, mask=number + further < k, other=-1)
        packed |= tl.where(place >> 3 == byte, 1 << (place & 7), 0)
    tl.store(codes + byte, packed.to(tl.uint8), mask=(number < k) & (byte != before))


@triton.jit
def _found(coded, size, n, number, BITMAP: tl.constexpr):
    """Look at each bit of a bitmap, or byte of gaps.

    Returns:
        whether a position ends there, its distance from the one before (int64; 0 in a bitmap), and
        whether the bytes are no code.
    """
    if BITMAP:
        byte = tl.load(coded + number // 8, mask=number < size * 8, other=0).to(tl.int32)
        found = (byte >> (number % 8).to(tl.int32) & 1) == 1
        step = number * 0
        bad = found & (number >= n)
    else:
        byte = tl.load(coded + number, mask=number < size, other=0).to(tl.int64)
        found = (number < size) & (byte < 0x80)
        gap, more = byte, found
        bad = (byte >= 0x80) & (number == size - 1)
        for back in tl.static_range(1, 6):
            before = tl.load(coded + number - back, mask=more & (number >= back), other=0)
            more = before >= 0x80
            if back == 1:
                bad |= more & (byte == 0)
            if back == 5:
                bad |= more
            gap = tl.where(more, gap << 7 | (before & 0x7F).to(tl.int64), gap)
        step = tl.where(found, gap + 1, 0)
    return found.to(tl.int64), step, bad.to(tl.int64)


@triton.jit(do_not_specialize=["size"])
def _count_kernel(coded, counts, size, n, BITMAP: tl.constexpr, BLOCK: tl.constexpr):
    """Write the sums of what `_found` returns: [3, programs]."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    number = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found, step, bad = _found(coded, size, n, number, BITMAP)
    tl.store(counts + block, tl.sum(found))
    tl.store(counts + blocks + block, tl.sum(step))
    tl.store(counts + 2 * blocks + block, tl.sum(bad))


@triton.jit(do_not_specialize=["size", "k"])
def _place_kernel(coded, sums, places, good, size, n, k, BITMAP: tl.constexpr, BLOCK: tl.constexpr):
    block, blocks = tl.program_id(0), tl.num_programs(0)
    number = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    found, step, _ = _found(coded, size, n, number, BITMAP)
    count, last = tl.load(sums + block), tl.load(sums + blocks + block)
    target = count - tl.sum(found) + tl.cumsum(found) - 1
    place = number if BITMAP else last - tl.sum(step) + tl.cumsum(step) - 1
    tl.store(places + target, place.to(tl.int32), mask=(found == 1) & (target < k))
    bad = tl.load(sums + 2 * blocks + block)
    valid = (count == k) & (last <= n) & (bad == 0)
    tl.store(good, valid.to(tl.int64), mask=block == blocks - 1)


def varint_stops(places: Tensor) -> Tensor:
    """Return where the gaps of each program's positions end, int64: the last is the size."""
    k = places.numel()
    lengths = torch.empty(max(1, triton.cdiv(k, BLOCK)), dtype=torch.int32, device=places.device)
    _length_kernel[lengths.shape](places, lengths, k, BLOCK=BLOCK)
    return lengths.cumsum(0)


def to_varint(places: Tensor, stops: Tensor, out: Tensor) -> None:
    """Write the gaps; `stops` as `varint_stops` returns them."""
    _varint_kernel[stops.shape](places, stops, out, places.numel(), BLOCK=BLOCK)


def to_bitmap(places: Tensor, out: Tensor) -> None:
    """Write the bitmap to `out`, of its size."""
    k = places.numel()
    out.zero_()
    _bitmap_kernel[(triton.cdiv(k, BLOCK),)](places, out, k, BLOCK=BLOCK)


def decode(coded: Tensor, n: int, bitmap: bool, places: Tensor, good: Tensor) -> None:
    """Write the positions, and to good[0] (int64) whether they are valid."""
    size = coded.numel()
    grid = (max(1, triton.cdiv(8 * size if bitmap else size, BLOCK)),)
    counts = torch.empty(3, *grid, dtype=torch.int64, device=coded.device)
    _count_kernel[grid](coded, counts, size, n, BITMAP=bitmap, BLOCK=BLOCK)
    sums, k = counts.cumsum(1), places.numel()
    _place_kernel[grid](coded, sums, places, good, size, n, k, BITMAP=bitmap, BLOCK=BLOCK)
