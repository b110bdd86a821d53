"""Positions of k of n elements as bytes: a bitmap or gaps of variable length.

* bitmap: ceil(n / 8) bytes; bit i % 8 of byte i // 8, lowest bit first, says whether element i is
  among them. Bits from n on are 0.
* varint: for each position the gap to the previous one (position - previous - 1, with -1 before
  the first), in LEB128: 7 bits in a byte, lowest first; a set upper bit says that more follow. At
  most 5 bytes, none of which is superfluous.

`smaller` is varint if it takes fewer bytes than the bitmap would, else the bitmap: n and the number
of bytes determine which it is.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.native import INT, POINTER, function
from shardlab.kernels.operators import register
from shardlab.kernels.parallel import for_each

Coding = Literal["smaller", "bitmap", "varint"]

_c_varint_bytes = function("indices_varint_bytes", POINTER, INT, POINTER)
_c_to_varint = function("indices_to_varint", POINTER, INT, POINTER)
_c_from_varint = function("indices_from_varint", POINTER, INT, INT, INT, POINTER, POINTER)
_c_to_bitmap = function("indices_to_bitmap", POINTER, INT, INT, POINTER)
_c_from_bitmap = function("indices_from_bitmap", POINTER, INT, INT, POINTER, POINTER)


def bitmap_bytes(n: int) -> int:
    """Return the size of a bitmap of n elements."""
    return -(-n // 8)


def most_bytes(n: int, k: int, coding: Coding) -> int:
    """Return the largest possible size of k of n positions."""
    bitmap = bitmap_bytes(n)
    if coding == "bitmap":
        return bitmap
    # the gaps sum to n - k at most, and each further byte of a gap uses up `price` of that sum
    most, left, price = k, n - k, 0
    for bits in (7, 14, 21, 28):
        price = (1 << bits) - price
        longer = min(k, left // price)
        most, left, price = most + longer, left - longer * price, 1 << bits
    return min(most, bitmap) if coding == "smaller" else most


def encode(places: Tensor, n: int, coding: Coding, out: Tensor) -> int:
    """Write the positions to the start of `out`; return the number of bytes.

    Args:
        places: int32 [k], contiguous, ascending, all different and below n.
        out: uint8 of at least `most_bytes(n, k, coding)` elements.
    """
    size = torch.empty(1, dtype=torch.int64)
    _encode(places, n, coding, out, size)
    return int(size)


def decode(coded: Sequence[Tensor], n: int, counts: Sequence[int], coding: Coding) -> list[Tensor]:
    """Return the positions, int32, in each of the given uint8 vectors.

    Raises:
        ValueError: one does not consist of `count` ascending positions below n.
    """
    device = coded[0].device
    places = [torch.empty(count, dtype=torch.int32, device=device) for count in counts]
    valid = torch.empty(len(places), dtype=torch.int64)
    _decode(list(coded), n, coding, places, valid)
    for good, each, count in zip(valid.tolist(), coded, counts, strict=True):
        if not good:
            raise ValueError(
                f"{each.numel()} bytes of indices are not {count} places among {n} elements"
            )
    return places


def encode_reference(places: Tensor, n: int, coding: str, out: Tensor, size: Tensor) -> None:
    """Run the operator `indices_encode` in PyTorch."""
    place = places.long()
    gaps = place - torch.cat([place.new_full((1,), -1), place[:-1]]) - 1
    lengths = sum(((gaps >= 1 << bits).long() for bits in (7, 14, 21, 28)), torch.ones_like(gaps))
    if _as_bitmap(int(lengths.sum()), n, coding):
        bits = torch.zeros(8 * bitmap_bytes(n), dtype=torch.uint8, device=out.device)
        bits[place] = 1
        weights = 1 << torch.arange(8, dtype=torch.uint8, device=out.device)
        coded = (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
    else:
        coded = torch.empty(int(lengths.sum()), dtype=torch.uint8, device=out.device)
        starts = lengths.cumsum(0) - lengths
        for byte in range(5):
            there = lengths > byte
            more = (lengths[there] > byte + 1).long() << 7
            coded[starts[there] + byte] = ((gaps[there] >> 7 * byte & 0x7F) | more).to(torch.uint8)
    out[: coded.numel()] = coded
    size.fill_(coded.numel())


def decode_reference(coded: Tensor, n: int, coding: str, places: Tensor) -> bool:
    """Decode one vector of the operator `indices_decode` in PyTorch; return whether it is valid."""
    if _is_bitmap(coded, n, coding):
        weights = torch.arange(8, dtype=torch.uint8, device=coded.device)
        found = (coded[:, None] >> weights & 1).flatten().nonzero().flatten()
    else:
        ends = coded < 0x80
        if coded.numel() and not bool(ends[-1]):
            return False
        stops = ends.nonzero().flatten()
        starts = torch.cat([stops.new_zeros(min(1, len(stops))), stops[:-1] + 1])
        lengths = stops - starts + 1
        number = (ends.long().cumsum(0) - ends.long()).clamp_max(len(stops) - 1)
        shift = 7 * (torch.arange(coded.numel(), device=coded.device) - starts[number])
        if bool((lengths > 5).any()) or bool(((coded[stops] == 0) & (lengths > 1)).any()):
            return False
        gaps = torch.zeros_like(stops).index_add_(0, number, (coded.long() & 0x7F) << shift)
        found = (gaps + 1).cumsum(0) - 1
    if found.numel() != places.numel() or (found.numel() and int(found[-1]) >= n):
        return False
    places.copy_(found)
    return True


def _as_bitmap(varint: int, n: int, coding: str) -> bool:
    return coding == "bitmap" or (coding == "smaller" and varint >= bitmap_bytes(n))


def _is_bitmap(coded: Tensor, n: int, coding: str) -> bool:
    return coding != "varint" and coded.numel() == bitmap_bytes(n)


def _run_encode(places: Tensor, n: int, coding: str, out: Tensor, size: Tensor) -> None:
    if places.dtype != torch.int32 or not places.is_contiguous():
        raise ValueError("places must be a contiguous int32 vector")
    triton = native.triton_kernels(places)
    if triton is None and not native.compiled(places):
        encode_reference(places, n, coding, out, size)
        return
    source, k = places.data_ptr(), places.numel()
    if coding != "bitmap" and triton:
        stops = triton.indices.varint_stops(places)
        size.copy_(stops[-1:])  # the host waits
    elif coding != "bitmap":
        _c_varint_bytes(source, k, size.data_ptr())
    bitmap = _as_bitmap(int(size), n, coding)
    if bitmap:
        size.fill_(bitmap_bytes(n))
    if out.dtype != torch.uint8 or not out.is_contiguous() or out.numel() < int(size):
        raise ValueError(f"indices need a contiguous uint8 vector of at least {int(size)} bytes")
    if triton and bitmap:
        triton.indices.to_bitmap(places, out[: int(size)])
    elif triton:
        triton.indices.to_varint(places, stops, out)
    elif bitmap:
        _c_to_bitmap(source, k, n, out.data_ptr())
    else:
        _c_to_varint(source, k, out.data_ptr())


def _run_decode(
    coded: Sequence[Tensor], n: int, coding: str, places: Sequence[Tensor], valid: Tensor
) -> None:
    for given in coded:
        if given.dtype != torch.uint8 or not given.is_contiguous():
            raise ValueError("indices must be a contiguous uint8 vector")

    def read(index: int) -> None:
        given, target = coded[index], places[index]
        good = valid[index : index + 1]
        if coding == "bitmap" and not _is_bitmap(given, n, coding):
            good.fill_(0)
        elif not native.compiled(given):
            good.fill_(decode_reference(given, n, coding, target))
        elif _is_bitmap(given, n, coding):
            _c_from_bitmap(
                *(given.data_ptr(), n, target.numel(), target.data_ptr(), good.data_ptr())
            )
        else:
            size, k = given.numel(), target.numel()
            _c_from_varint(given.data_ptr(), size, k, n, target.data_ptr(), good.data_ptr())

    if native.compiled(valid if not coded else coded[0]):
        for_each(range(len(coded)), read)
        return
    if (triton := native.triton_kernels(coded[0])) is not None:
        found = torch.zeros(len(coded), dtype=torch.int64, device=coded[0].device)
        for index, (given, target) in enumerate(zip(coded, places, strict=True)):
            bitmap = _is_bitmap(given, n, coding)
            if bitmap or coding != "bitmap":
                triton.indices.decode(given, n, bitmap, target, found[index:])
        valid.copy_(found)  # the host waits, once for all
        return
    # not on threads: a device's current stream is that of the calling thread
    for index in range(len(coded)):
        read(index)


_encode = register(
    "indices_encode(Tensor places, int n, str coding, Tensor(a!) out, Tensor(b!) size) -> ()",
    _run_encode,
)
_decode = register(
    "indices_decode(Tensor[] coded, int n, str coding, Tensor(a!)[] places, Tensor(b!) valid) "
    "-> ()",
    _run_decode,
)
