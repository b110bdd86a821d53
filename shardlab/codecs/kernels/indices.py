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
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.native import INT, POINTER, function
from shardlab.codecs.kernels.operators import register
from shardlab.codecs.kernels.parallel import for_each
from shardlab.core.device import accelerator_of

Coding = Literal["smaller", "elias_fano", "bitmap"]

_c_encode = function("indices_encode", POINTER, *[INT] * 5, POINTER)
_c_decode = function("indices_decode", POINTER, *[INT] * 6, POINTER, POINTER)


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
    def of(n: int, k: int, coding: Coding) -> "Split":
        """Return the sizes for 0 <= k <= n."""
        if not k:
            return Split(0, 0, 0, 0)
        bits = (n // k).bit_length() - 1
        bitmap = Split(0, 0, 0, -(-n // 8))
        split = Split(bits, 1, -(-k * bits // 8), -(-(k + (n - 1 >> bits)) // 8))
        shorter = coding == "smaller" and bitmap.size < split.size
        return bitmap if coding == "bitmap" or shorter else split


def most_bytes(n: int, k: int, coding: Coding) -> int:
    """Return a size that suffices for at most k of n positions."""
    # bits grow with k, but each of both streams is rounded up to a byte
    return Split.of(n, k, coding).size + 1


def encode(places: Tensor, n: int, coding: Coding, out: Tensor) -> None:
    """Write the positions.

    Args:
        places: int32 [k], contiguous, ascending, all different and below n.
        out: uint8 [Split.of(n, k, coding).size], contiguous.
    """
    _encode(places, n, coding, out)


def decode(coded: Sequence[Tensor], n: int, counts: Sequence[int], coding: Coding) -> list[Tensor]:
    """Return the positions, int32, in each of the given uint8 vectors.

    Raises:
        ValueError: one has not the size of `count` positions, or on a CPU is not made of as many
            ascending ones below n. On a device, where the host would wait for the answer, such
            bytes become any positions below n.
    """
    device = coded[0].device
    for each, count in zip(coded, counts, strict=True):
        if not 0 <= count <= n or each.numel() != Split.of(n, count, coding).size:
            raise _refusal(each, n, count)
    places = [torch.empty(count, dtype=torch.int32, device=device) for count in counts]
    valid = torch.ones(len(places), dtype=torch.int64)
    _decode(list(coded), n, coding, places, valid)
    if accelerator_of(device) is None:
        for good, each, count in zip(valid.tolist(), coded, counts, strict=True):
            if not good:
                raise _refusal(each, n, count)
    return places


def encode_reference(places: Tensor, n: int, coding: Coding, out: Tensor) -> None:
    """Run the operator `indices_encode` in PyTorch."""
    k, device = places.numel(), places.device
    split, place = Split.of(n, k, coding), places.long()
    number = split.spread * torch.arange(k, device=device)
    bits = torch.zeros(8 * out.numel(), dtype=torch.uint8, device=device)
    lower = place[:, None] >> torch.arange(split.bits, device=device) & 1
    bits[: k * split.bits] = lower.flatten().to(torch.uint8)
    bits[8 * split.lower + (place >> split.bits) + number] = 1
    weights = 1 << torch.arange(8, dtype=torch.uint8, device=device)
    out.copy_((bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8))


def decode_reference(coded: Tensor, n: int, coding: Coding, places: Tensor) -> Tensor:
    """Decode one vector of the operator `indices_decode` in PyTorch; return whether it is valid."""
    k, device = places.numel(), coded.device
    split = Split.of(n, k, coding)
    number = split.spread * torch.arange(k, device=device)
    bits = (coded[:, None] >> torch.arange(8, dtype=torch.uint8, device=device) & 1).flatten()
    lower = bits[: k * split.bits].view(k, split.bits).long()
    upper = bits[8 * split.lower :].long()
    # the place of each one; those beyond k, and the zeros, go to an element that is dropped
    rank = torch.where(upper == 1, upper.cumsum(0) - 1, k).clamp_max(k)
    ones = torch.zeros(k + 1, dtype=torch.int64, device=device)
    ones.scatter_(0, rank, torch.arange(len(upper), device=device))
    found = (ones[:k] - number) << split.bits
    found += (lower << torch.arange(split.bits, device=device)).sum(1)
    valid = (upper.sum() == k) & (found.diff() > 0).all() & (found < n).all()
    places.copy_(found.clamp(0, max(n - 1, 0)))
    return valid


def _refusal(coded: Tensor, n: int, count: int) -> ValueError:
    return ValueError(f"{coded.numel()} bytes of indices are not {count} places among {n} elements")


def _run_encode(places: Tensor, n: int, coding: Coding, out: Tensor) -> None:
    if places.dtype != torch.int32 or not places.is_contiguous():
        raise ValueError("places must be a contiguous int32 vector")
    k = places.numel()
    split = Split.of(n, k, coding)
    if out.dtype != torch.uint8 or not out.is_contiguous() or out.numel() != split.size:
        raise ValueError(f"indices need a contiguous uint8 vector of {split.size} bytes")
    if (triton := native.triton_kernels(places)) is not None:
        triton.indices.encode(places, *split[:2], out[: split.lower], out[split.lower :])
    elif native.compiled(places):
        _c_encode(places.data_ptr(), k, *split, out.data_ptr())
    else:
        encode_reference(places, n, coding, out)


def _run_decode(
    coded: Sequence[Tensor], n: int, coding: Coding, places: Sequence[Tensor], valid: Tensor
) -> None:
    for given in coded:
        if given.dtype != torch.uint8 or not given.is_contiguous():
            raise ValueError("indices must be a contiguous uint8 vector")

    def read(index: int) -> None:
        given, target = coded[index], places[index]
        k, good = target.numel(), valid[index:].data_ptr()
        split = Split.of(n, k, coding)
        _c_decode(given.data_ptr(), n, k, *split, target.data_ptr(), good)

    if native.compiled(coded[0]):
        for_each(range(len(coded)), read)
        return
    triton = native.triton_kernels(coded[0])
    # not on threads: a device's current stream is that of the calling thread
    for index, (given, target) in enumerate(zip(coded, places, strict=True)):
        if triton is not None:
            split = Split.of(n, target.numel(), coding)
            parts = given[: split.lower], given[split.lower :]
            triton.indices.decode(*parts, n, *split[:2], target)
        else:
            good = decode_reference(given, n, coding, target)
            if accelerator_of(given.device) is None:
                valid[index] = good


_encode = register(
    "indices_encode(Tensor places, int n, str coding, Tensor(a!) out) -> ()", _run_encode
)
_decode = register(
    "indices_decode(Tensor[] coded, int n, str coding, Tensor(a!)[] places, Tensor(b!) valid) "
    "-> ()",
    _run_decode,
)
