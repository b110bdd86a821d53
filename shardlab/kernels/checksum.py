"""A checksum of 32 bits at the speed of memory, for whole 64-bit words.

With the words w_j (j from 0, little endian) in rows of 32 and R rows, all modulo 2^64:

    A = sum of w_j        B = sum of (R - floor(j / 32)) * w_j        C = A + 2 * M * B

with M = 0x9E3779B97F4A7C15 (odd); the checksum is the upper half of C xor its lower half. B tells
words that changed places by whole rows. One flipped bit changes C for certain, since 1 + 2 * M * i
is odd, and goes unnoticed by the halves with a chance of about 2^-32, as any other damage does.
"""

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.native import INT, POINTER, function
from shardlab.kernels.operators import register
from shardlab.kernels.parallel import for_ranges

_ROW = 32
_MIX = 2 * 0x9E3779B97F4A7C15
_WIDE, _HALF = (1 << 64) - 1, (1 << 32) - 1

_c_checksum = function("checksum", POINTER, INT, INT, POINTER)


def checksum(data: Tensor) -> int:
    """The checksum of `data`, uint8, contiguous, a multiple of 8 bytes: a number below 2^32.

    Raises:
        ValueError: `data` is something else.
    """
    if data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() % 8:
        raise ValueError(
            f"checksum: needs contiguous bytes, a multiple of 8, not {data.numel()} {data.dtype} "
            f"of strides {data.stride()}"
        )
    sums = torch.empty(2, dtype=torch.int64)
    _checksum(data, sums)
    plain, weighted = sums.tolist()
    mixed = (plain + _MIX * weighted) & _WIDE
    return (mixed >> 32) ^ (mixed & _HALF)


def checksum_reference(data: Tensor, sums: Tensor) -> None:
    """The operator `checksum` in PyTorch: sums[0] = A, sums[1] = B, int64 on the CPU."""
    words = data.view(torch.int64)
    rows = -(-words.numel() // _ROW)
    row = torch.arange(words.numel(), device=data.device) // _ROW
    sums.copy_(torch.stack([words.sum(), (words * (rows - row)).sum()]))


def _run(data: Tensor, sums: Tensor) -> None:
    if not native.compiled(data):
        checksum_reference(data, sums)
        return
    words, address = data.numel() // 8, data.data_ptr()
    # one range of one thread ends the message: its sums are those of the whole
    ends: list[tuple[int, Tensor]] = []

    def part(start: int, stop: int) -> None:
        found = sums if stop == words else torch.empty_like(sums)
        _c_checksum(address, start, stop, found.data_ptr())
        ends.append((stop, found))

    for_ranges(words, _ROW, part)
    for stop, found in ends:
        if stop < words:
            found[1] += found[0] * -(-(words - stop) // _ROW)
            sums += found


_checksum = register("checksum(Tensor data, Tensor(a!) sums) -> ()", _run)
