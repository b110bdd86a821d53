"""Positions of k of n elements as bytes, whose number n and k alone determine.

`elias_fano`: a position p is split into its lower l = floor(log2(n / k)) bits and the rest. A
stream of bits, the lowest of a byte first, holds the lower parts of all positions in their order, l
bits each, lowest bit first; it is filled up with zeros to a byte. A second one of
k + floor((n - 1) / 2^l) bits has a one at (p >> l) + j for position j. Elias 1974 and Fano 1971;
Vigna 2013, Quasi-succinct indices, section 3. Up to k = n / 8 it takes at most 0.7 bits per
position more than any code of k of n positions must.

`bitmap`: n bits, of which those of the positions are ones: the second stream for l = 0, without
the j. `smaller` is the bitmap where that takes fewer bytes, from about k = n / 4 on.

For k = 0 there are no bytes. Neither the host of a device nor a receiver has to ask for a size.
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
    """Sizes of the two streams of k of n positions."""

    bits: int
    """l: lower bits of each position"""
    spread: int
    """0 or 1: zeros in the second stream between ones that would follow one another"""
    lower: int
    """bytes of the lower parts"""
    upper: int
    """bytes of the rest"""

    @property
    def size(self) -> int:
        """Return the bytes of both."""
        return self.lower + self.upper

    @staticmethod
    def of(n: int, k: int, coding: Indices) -> "Split":
        """Return the sizes for 0 <= k <= n."""
        if not k:
            return Split(0, 0, 0, 0)
        bits = (n // k).bit_length() - 1
        bitmap = Split(0, 0, 0, -(-n // 8))
        split = Split(bits, 1, -(-k * bits // 8), -(-(k + (n - 1 >> bits)) // 8))
        shorter = coding == "smaller" and bitmap.size < split.size
        return bitmap if coding == "bitmap" or shorter else split


def most_bytes(n: int, k: int, coding: Indices) -> int:
    """Return a size that suffices for at most k of n positions."""
    # bits grow with k, but each of both streams is rounded up to a byte
    return Split.of(n, k, coding).size + 1


def encode(positions: Tensor, n: int, coding: Indices, out: Tensor) -> None:
    """Write the positions.

    Args:
        positions: int32 [k], contiguous, ascending, all different and below n.
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
    """Return the positions, int32, in each of the given uint8 vectors.

    Raises:
        ValueError: one has not the size of `count` positions, or on a CPU is not made of as many
            ascending ones below n. On a device, where the host would wait for the answer, such
            bytes become any positions below n.
    """
    splits = []
    for part, count in zip(coded, counts, strict=True):
        if not 0 <= count <= n or part.numel() != Split.of(n, count, coding).size:
            raise _refusal(part, n, count)
        splits.append(Split.of(n, count, coding))
    on_host = accelerator_of(coded[0].device) is None
    if native.compiled(coded[0]):
        positions = [coded[0].new_empty(count, dtype=torch.int32) for count in counts]
        valid = torch.ones(len(coded), dtype=torch.int64)
        sizes = [size for k, split in zip(counts, splits, strict=True) for size in (k, *split)]
        _DECODE(threads_for(sum(counts)), list(coded), n, sizes, positions, valid)
        good = valid.tolist()
    else:
        decoded = [
            decode_reference(part, n, k, list(split))
            for part, k, split in zip(coded, counts, splits, strict=True)
        ]
        positions = [found for found, _ in decoded]
        good = [bool(valid) if on_host else True for _, valid in decoded]
    for fine, part, count in zip(good, coded, counts, strict=True):
        if not fine:
            raise _refusal(part, n, count)
    return positions


@compiled_on_gpus
def encode_reference(positions: Tensor, split: list[int], out: Tensor) -> None:
    """Write positions in PyTorch.

    Args:
        split: the fields of a `Split`.
    """
    width, spread, border, _ = split
    k, device = positions.numel(), positions.device
    at = positions.long()
    lower = (at[:, None] >> torch.arange(width, device=device) & 1).to(torch.uint8).flatten()
    upper = torch.zeros(8 * (out.numel() - border), dtype=torch.uint8, device=device)
    upper[(at >> width) + spread * torch.arange(k, device=device)] = 1
    filled = torch.nn.functional.pad(lower, (0, 8 * border - lower.numel()))
    bits = torch.cat([filled, upper]).view(-1, 8)
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    out.copy_((bits * weights).sum(1, dtype=torch.uint8))


@compiled_on_gpus
def decode_reference(coded: Tensor, n: int, k: int, split: list[int]) -> tuple[Tensor, Tensor]:
    """Return k positions, all below n whatever the bytes are, and whether these are valid."""
    width, spread, border, _ = split
    device = coded.device
    bits = (coded[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten()
    lower = bits[: k * width].view(k, width).long()
    upper = bits[8 * border :].long()
    # the position of each one; those beyond k, and the zeros, go to an element that is dropped
    rank = torch.where(upper == 1, upper.cumsum(0) - 1, k).clamp_max(k)
    ones = torch.zeros(k + 1, dtype=torch.int64, device=device)
    ones.scatter_(0, rank, torch.arange(len(upper), device=device))
    found = (ones[:k] - spread * torch.arange(k, device=device)) << width
    found = found + (lower << torch.arange(width, device=device)).sum(1)
    valid = (upper.sum() == k) & (found.diff() > 0).all() & (found < n).all()
    return found.clamp(0, max(n - 1, 0)).to(torch.int32), valid


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
