"""Random positions in Triton: `random_places` of shardlab/codecs/kernels/random.py, before the sort."""

import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import BLOCK, signed
from shardlab.codecs.kernels.triton.numbers import random_bits


@triton.jit(do_not_specialize=["k", "k0", "k1"])
def _places_kernel(places, n, k, k0, k1, BLOCK: tl.constexpr):
    part = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    start = part * n // k
    size = (part + 1) * n // k - start
    drawn = random_bits(part.to(tl.uint32), k0, k1).to(tl.int64)
    last = (tl.full([1], 0, tl.int64) + k).to(tl.uint32)
    shift = random_bits(last, k0, k1).to(tl.int64) * n >> 32
    place = (start + (drawn * size >> 32) + shift) % n
    tl.store(places + part, place.to(tl.int32), mask=part < k)


def draw(n: int, k0: int, k1: int, places: Tensor) -> None:
    """Run the operator `randomk_places` on the GPU."""
    k = places.numel()
    _places_kernel[(triton.cdiv(k, BLOCK),)](places, n, k, signed(k0), signed(k1), BLOCK=BLOCK)
