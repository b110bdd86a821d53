"""Positions of k of n elements, encoded in a number of bytes that depends only on n and k.

`elias_fano`: a position p is split into its lower l = floor(log2(n / k)) bits and its upper bits.
The first stream holds the lower bits of all positions in order, l bits per position, and is padded
with zeros to a byte. The second stream has k + floor((n - 1) / 2^l) bits; for position j it has a
one at (p >> l) + j. In both streams the lowest bit of a byte or position comes first. Elias 1974
and Fano 1971; Vigna 2013, Quasi-succinct indices, section 3. Up to k = n / 8 it takes at most 0.7
bits per position more than the information-theoretic bound.

`bitmap`: n bits, with a one at each position. This is the second stream for l = 0, without the j.
`smaller`: the bitmap if it takes fewer bytes, from about k = n / 4 on, else `elias_fano`.

k = 0 takes 0 bytes. Since n and k determine the size, a receiver need not be told it, and the host
need not wait for a GPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.core.device import accelerator_of
from shardlab.kernels import native
from shardlab.kernels.compiled import compiled_on_gpus
from shardlab.kernels.operators import kernel
from shardlab.kernels.workers import threads_for
from shardlab.strategy.codec_options import Indices


class Split(NamedTuple):
    """Sizes of the two streams that encode k of n positions."""

    bits: int
    """Lower bits of each position: l."""
    spread: int
    """Factor of j in the second stream: 1, or 0 for a bitmap."""
    lower: int
    """Bytes of the first stream."""
    upper: int
    """Bytes of the second stream."""

    @property
    def size(self) -> int:
        """Return the bytes of both streams."""
        return self.lower + self.upper

    @staticmethod
    def of(n: int, k: int, coding: Indices) -> "Split":
        """Return the sizes for k of n positions, 0 <= k <= n."""
        if not k:
            return Split(0, 0, 0, 0)
        bits = (n // k).bit_length() - 1
        bitmap = Split(0, 0, 0, -(-n // 8))
        split = Split(bits, 1, -(-k * bits // 8), -(-(k + (n - 1 >> bits)) // 8))
        shorter = coding == "smaller" and bitmap.size < split.size
        return bitmap if coding == "bitmap" or shorter else split


def max_bytes(n: int, k: int, coding: Indices) -> int:
    """Return an upper bound of the bytes for k or fewer of n positions."""
    # the bits grow with k, but each stream is rounded up to a byte
    return Split.of(n, k, coding).size + 1


def encode(positions: Tensor, n: int, coding: Indices, out: Tensor) -> None:
    """Write encoded positions to `out`.

    Args:
        positions: int32 [k], contiguous, ascending, distinct, below n.
        out: uint8 [Split.of(n, k, coding).size], contiguous.
    """
    native.check_positions(positions, positions)
    split = Split.of(n, positions.numel(), coding)
    native.check("out", out, split.size, positions.device, torch.uint8)
    if native.compiled(positions):
        _ENCODE(positions, *split, out)
    else:
        encode_reference(positions, list(split), out)


def decode(coded: Sequence[Tensor], n: int, counts: Sequence[int], coding: Indices) -> list[Tensor]:
    """Return the positions, int32, in each of the uint8 vectors.

    Raises:
        ValueError: The size of a vector does not fit its count; or, on a CPU, its bytes are not
            `count` ascending positions below n. On a GPU such bytes decode to arbitrary positions
            below n, since the host would have to wait for the check.
    """
    splits = []
    for part, count in zip(coded, counts, strict=True):
        if not 0 <= count <= n or part.numel() != Split.of(n, count, coding).size:
            raise _refusal(part, n, count)
        splits.append(Split.of(n, count, coding))
    on_host = accelerator_of(coded[0].device) is None
    if native.compiled(coded[0]):
        positions = [coded[0].new_empty(count, dtype=torch.int32) for count in counts]
        flags = torch.ones(len(coded), dtype=torch.int64)
        sizes = [size for k, split in zip(counts, splits, strict=True) for size in (k, *split)]
        _DECODE(threads_for(sum(counts)), list(coded), n, sizes, positions, flags)
        valid = flags.tolist()
    else:
        decoded = [
            decode_reference(part, n, k, list(split))
            for part, k, split in zip(coded, counts, splits, strict=True)
        ]
        positions = [part_positions for part_positions, _ in decoded]
        valid = [bool(flag) if on_host else True for _, flag in decoded]
    for is_valid, part, count in zip(valid, coded, counts, strict=True):
        if not is_valid:
            raise _refusal(part, n, count)
    return positions


@compiled_on_gpus
def encode_reference(positions: Tensor, split: list[int], out: Tensor) -> None:
    """Run `encode` in PyTorch.

    Args:
        split: Fields of a `Split`.
    """
    width, spread, border, _ = split
    k, device = positions.numel(), positions.device
    index = positions.long()
    lower = (index[:, None] >> torch.arange(width, device=device) & 1).to(torch.uint8).flatten()
    upper = torch.zeros(8 * (out.numel() - border), dtype=torch.uint8, device=device)
    upper[(index >> width) + spread * torch.arange(k, device=device)] = 1
    padded = torch.nn.functional.pad(lower, (0, 8 * border - lower.numel()))
    bits = torch.cat([padded, upper]).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    out.copy_((bits * weights).sum(1, dtype=torch.uint8))


@compiled_on_gpus
def decode_reference(coded: Tensor, n: int, k: int, split: list[int]) -> tuple[Tensor, Tensor]:
    """Return k positions, below n for any bytes, and a bool []: whether the bytes are valid."""
    width, spread, border, _ = split
    device = coded.device
    bits = (coded[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten()
    lower = bits[: k * width].view(k, width).long()
    upper = bits[8 * border :].long()
    # the position of each one bit; zeros, and ones after the k-th, go to an element that is dropped
    rank = torch.where(upper == 1, upper.cumsum(0) - 1, k).clamp_max(k)
    ones = torch.zeros(k + 1, dtype=torch.int64, device=device)
    ones.scatter_(0, rank, torch.arange(len(upper), device=device))
    positions = (ones[:k] - spread * torch.arange(k, device=device)) << width
    positions = positions + (lower << torch.arange(width, device=device)).sum(1)
    valid = (upper.sum() == k) & (positions.diff() > 0).all() & (positions < n).all()
    return positions.clamp(0, max(n - 1, 0)).to(torch.int32), valid


def _refusal(coded: Tensor, n: int, count: int) -> ValueError:
    return ValueError(
        f"{coded.numel()} bytes of indices are not {count} positions among {n} elements"
    )


_ENCODE = kernel(
    "positions_encode",
    "Tensor positions, size(positions), int bits, int spread, int lower, int upper, Tensor(a!) out",
)
_DECODE = kernel(
    "positions_decode",
    "int workers, Tensor[] coded, size(coded), int n, int[] sizes, Tensor(a!)[] positions, "
    "Tensor(b!) valid",
)
