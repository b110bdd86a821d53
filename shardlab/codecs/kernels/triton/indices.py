"""The codes of shardlab/codecs/kernels/indices.py in Triton.

Sizes differ by message, so no kernel is specialised for them: Triton would compile while training.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import BLOCK


@triton.jit(do_not_specialize=["k", "bits", "size"])
def _lower_kernel(places, codes, k, bits, size, BLOCK: tl.constexpr):
    """Write each byte of the lower parts: of nine positions at most, if they have a bit each."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = byte * 8 // bits
    packed = tl.zeros([BLOCK], tl.int64)
    for further in tl.static_range(9):
        number = first + further
        start = number * bits - byte * 8  # of its bits, from -31 on
        inside = (number < k) & (start < 8)
        place = tl.load(places + number, mask=inside, other=0).to(tl.int64)
        low = place & ((1 << bits.to(tl.int64)) - 1)
        packed |= tl.where(start < 0, low >> tl.maximum(-start, 0), low << tl.maximum(start, 0))
    tl.store(codes + byte, (packed & 0xFF).to(tl.uint8), mask=byte < size)


@triton.jit
def _one(places, number, inside, bits, spread):
    """Return where the one of a position is; -1 where there is none."""
    place = tl.load(places + number, mask=inside, other=0)
    return tl.where(inside, (place >> bits).to(tl.int64) + spread * number, -1)


@triton.jit(do_not_specialize=["k", "bits", "spread"])
def _upper_kernel(places, codes, k, bits, spread, BLOCK: tl.constexpr):
    """Write each byte with a one, by the program of its first position."""
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = _one(places, number, number < k, bits, spread) >> 3
    before = _one(places, number - 1, (number < k) & (number > 0), bits, spread) >> 3
    packed = tl.zeros([BLOCK], tl.int32)
    for further in tl.static_range(8):
        one = _one(places, number + further, number + further < k, bits, spread)
        packed |= tl.where(one >> 3 == byte, 1 << (one & 7).to(tl.int32), 0)
    tl.store(codes + byte, packed.to(tl.uint8), mask=(number < k) & (byte != before))


@triton.jit
def _ones(upper, size, at):
    """Return whether a bit is one, int32."""
    byte = tl.load(upper + at // 8, mask=at < size * 8, other=0).to(tl.int32)
    return byte >> (at % 8).to(tl.int32) & 1


@triton.jit(do_not_specialize=["size"])
def _count_kernel(upper, counts, size, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + block, tl.sum(_ones(upper, size, at)))


@triton.jit(do_not_specialize=["lower_size", "size", "bits", "spread", "n", "k"])
def _place_kernel(
    lower, upper, stops, places, lower_size, size, bits, spread, n, k, BLOCK: tl.constexpr
):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    one = _ones(upper, size, at)
    number = tl.load(stops + block).to(tl.int64) - tl.sum(one) + tl.cumsum(one) - 1
    mine = (one == 1) & (number < k)
    start = number * bits
    word = tl.zeros([BLOCK], tl.int64)
    for further in tl.static_range(5):
        byte = start // 8 + further
        found = tl.load(lower + byte, mask=mine & (byte < lower_size), other=0)
        word |= found.to(tl.int64) << 8 * further
    low = (word >> start % 8) & ((1 << bits.to(tl.int64)) - 1)
    place = (at - spread * number << bits.to(tl.int64)) | low
    # of damaged bytes, too, positions are addresses
    tl.store(places + number, tl.minimum(place, n - 1).to(tl.int32), mask=mine)


def encode(places: Tensor, bits: int, spread: int, lower: Tensor, upper: Tensor) -> None:
    """Run the operator `indices_encode` on the GPU; the bytes of both streams."""
    k = places.numel()
    upper.zero_()
    if lower.numel():
        grid = (triton.cdiv(lower.numel(), BLOCK),)
        _lower_kernel[grid](places, lower, k, bits, lower.numel(), BLOCK=BLOCK)
    if k:
        _upper_kernel[(triton.cdiv(k, BLOCK),)](places, upper, k, bits, spread, BLOCK=BLOCK)


def decode(lower: Tensor, upper: Tensor, n: int, bits: int, spread: int, places: Tensor) -> None:
    """Run the operator `indices_decode` on the GPU, without a look at what is valid."""
    k, size = places.numel(), upper.numel()
    places.zero_()  # of damaged bytes there may be fewer
    if not k:
        return
    grid = (triton.cdiv(8 * size, BLOCK),)
    counts = torch.empty(grid, dtype=torch.int32, device=upper.device)
    _count_kernel[grid](upper, counts, size, BLOCK=BLOCK)
    stops = counts.cumsum(0)
    _place_kernel[grid](
        *(lower, upper, stops, places, lower.numel(), size, bits, spread, n, k), BLOCK=BLOCK
    )
