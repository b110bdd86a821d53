"""The kernels of shardlab/codecs/kernels/checksum.py in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import BLOCK, signed

_ROW = tl.constexpr(32)
_FIRST = tl.constexpr(0xFF51AFD7ED558CCD - (1 << 64))
_SECOND = tl.constexpr(0xC4CEB9FE1A85EC53 - (1 << 64))


# sizes of some messages vary: Triton would compile while training
@triton.jit(do_not_specialize=["n"])
def _sum_kernel(data, sums, n, BLOCK: tl.constexpr):
    """Write the plain sums of all blocks, then the weighted ones."""
    block, blocks = tl.program_id(0), tl.num_programs(0)
    place = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(data + place, mask=place < n, other=0)
    weight = (n + _ROW - 1) // _ROW - place // _ROW
    tl.store(sums + block, tl.sum(word))
    tl.store(sums + blocks + block, tl.sum(word * weight))


@triton.jit
def _upper_half_into_lower(word):
    return word ^ ((word >> 33) & 0x7FFFFFFF)


@triton.jit(do_not_specialize=["blocks", "identity"])
def _mix_kernel(sums, header, blocks, identity, BLOCK: tl.constexpr):
    """Mix the sums of all blocks, in one program."""
    at = tl.arange(0, BLOCK)
    plain, weighted = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for start in range(0, blocks, BLOCK):
        inside = start + at < blocks
        plain += tl.load(sums + start + at, mask=inside, other=0)
        weighted += tl.load(sums + blocks + start + at, mask=inside, other=0)
    mixed = _upper_half_into_lower(tl.sum(plain)) * _FIRST + tl.sum(weighted)
    mixed = _upper_half_into_lower(_upper_half_into_lower(mixed) * _SECOND)
    tl.store(header, (mixed << 32) | (identity.to(tl.int64) & 0xFFFFFFFF))


def write_header(words: Tensor, identity: int, header: Tensor) -> None:
    """Run the operator `write_header` on the GPU, in two launches."""
    blocks = triton.cdiv(words.numel(), BLOCK)
    sums = torch.empty(2 * blocks, dtype=torch.int64, device=words.device)
    if blocks:
        _sum_kernel[(blocks,)](words, sums, words.numel(), BLOCK=BLOCK)
    _mix_kernel[(1,)](sums, header, blocks, signed(identity), BLOCK=BLOCK)
