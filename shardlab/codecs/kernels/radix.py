"""Radix select by the compiled kernels of csrc/select.cpp.

A magnitude that somewhat more than k elements reach is guessed from a random sample. One pass over
the vector gathers those elements (and adds the residual); a radix select of 11 + 10 + 10 bits among
them finds the exact threshold. Where the guess was wrong the radix select runs over the whole
vector. The result depends neither on the guess nor on the number of threads.
"""

import ctypes
import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.codecs.kernels.native import INT, POINTER, address, function
from shardlab.codecs.kernels.parallel import for_each, ranges

_INT32 = ctypes.c_int32
_SAMPLES = 1 << 13
_BLOCK = 1024  # csrc/select.cpp
_WORD = 64  # csrc/select.cpp: the kernel stops before fewer free elements than these
_KEPT = 1 << 22
"""words of memory that a thread keeps at most"""
_DIGITS = ((20, 11), (10, 10), (0, 10))
"""shift and width of the digits of a magnitude of 31 bits"""

_c_sample = function("select_sample", POINTER, POINTER, INT, INT, POINTER)
_c_gather = function(
    "select_gather",
    *(POINTER, POINTER, POINTER, INT, INT, _INT32, INT, POINTER, POINTER, POINTER),
)
_c_count = function("select_count", POINTER, POINTER, INT, INT, _INT32, _INT32, _INT32, POINTER)
_c_digit = function("select_digit", POINTER, INT, INT, POINTER, POINTER, POINTER, POINTER)
_c_collect = function(
    "select_collect", *(POINTER, POINTER, POINTER, INT, INT, _INT32, INT, POINTER, POINTER)
)


class _Part(NamedTuple):
    """x[start:stop] (+ residual), by address; `names` are its positions, if not start to stop."""

    x: int
    residual: int | None
    names: int | None
    start: int
    stop: int


class _Cut(NamedTuple):
    """Selected magnitudes: all above `threshold`, and in each part the first `ties` equal to it."""

    threshold: int
    above: list[int]
    """elements above, by part"""
    ties: list[int]


def select(
    x: Tensor,
    residual: Tensor | None,
    kept: Tensor | None,
    floor: int,
    values: Tensor,
    places: Tensor,
) -> int:
    """Write the largest elements of `x + residual`; return how many were written.

    Arguments as in `shardlab.codecs.kernels.select.largest`.
    """
    n, k = x.numel(), values.numel()
    whole, after = _parts(x, residual), address(kept)
    guess, capacity = _guess(whole[0], n, k, floor)
    capacities = [min(capacity, part.stop - part.start) + _WORD for part in whole]
    store = _scratch(capacities)
    counts = _gather(whole, after, guess, capacities, store)
    fits = all(count <= size - _WORD for count, size in zip(counts, capacities, strict=True))
    wanted = k if guess > floor else min(k, sum(counts))
    if fits and sum(counts) >= wanted:
        parts = [
            _Part(found.data_ptr(), None, names.data_ptr(), 0, count)
            for (found, names), count in zip(store, counts, strict=True)
        ]
        exact = sum(counts) == wanted
        cut = _Cut(guess - 1, counts, [0] * len(parts)) if exact else _cut(parts, wanted)
    elif fits and guess == 1:
        # all that is not zero, and as many zeros as it takes
        parts = whole
        zeros = [part.stop - part.start - count for part, count in zip(whole, counts, strict=True)]
        cut = _Cut(0, counts, _share(wanted - sum(counts), zeros))
    else:
        parts, cut = whole, _cut(whole, wanted)
    _collect(parts, cut, values, places)
    return wanted


def count_at_least(x: Tensor, residual: Tensor | None, kept: Tensor | None, floor: int) -> int:
    """Count the elements of `x + residual` of magnitude `floor` or more; write `kept`."""
    whole = _parts(x, residual)
    none = (x.new_empty(0), torch.empty(0, dtype=torch.int32))
    return sum(_gather(whole, address(kept), floor, [0] * len(whole), [none] * len(whole)))


class _Scratch(threading.local):
    """Buffers for values and positions, reused by a thread: fresh pages cost more than the work."""

    _memory = torch.empty(0, dtype=torch.int32)

    def __call__(self, capacities: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        size = 2 * sum(capacities)
        memory = (
            self._memory if size <= self._memory.numel() else torch.empty(size, dtype=torch.int32)
        )
        if size <= _KEPT:
            self._memory = memory
        pieces = memory[:size].split([capacity for capacity in capacities for _ in range(2)])
        return [
            (values.view(torch.float32), places)
            for values, places in zip(pieces[::2], pieces[1::2], strict=True)
        ]


_scratch = _Scratch()


def _parts(x: Tensor, residual: Tensor | None) -> list[_Part]:
    spans = ranges(x.numel(), _BLOCK)
    return [_Part(x.data_ptr(), address(residual), None, *span) for span in spans]


def _guess(first: _Part, n: int, k: int, floor: int) -> tuple[int, int]:
    """Return a magnitude that most likely k elements reach, and the capacity for those that do."""
    if n <= 4 * _SAMPLES:
        return floor, n
    expected = k * _SAMPLES / n
    rank = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if rank > _SAMPLES:
        return floor, n
    samples = torch.empty(_SAMPLES)
    _c_sample(first.x, first.residual, n, _SAMPLES, samples.data_ptr())
    guess = _cut([_Part(samples.data_ptr(), None, None, 0, _SAMPLES)], rank).threshold
    return max(guess, floor, 1), 2 * rank * n // _SAMPLES


def _gather(
    parts: Sequence[_Part],
    kept: int | None,
    floor: int,
    capacities: Sequence[int],
    store: Sequence[tuple[Tensor, Tensor]],
) -> list[int]:
    counts = torch.empty(len(parts), dtype=torch.int64)

    def gather(index: int) -> None:
        part, (values, places) = parts[index], store[index]
        _c_gather(
            *(part.x, part.residual, kept, part.start, part.stop, floor, capacities[index]),
            *(values.data_ptr(), places.data_ptr(), counts[index:].data_ptr()),
        )

    for_each(range(len(parts)), gather)
    return counts.tolist()


def _cut(parts: Sequence[_Part], wanted: int) -> _Cut:
    """Return the cut that selects `wanted` elements, of at least as many."""
    found = torch.zeros(2 * len(parts) + 2, dtype=torch.int64)
    above, equal, missing, digit = found.split([len(parts), len(parts), 1, 1])
    missing.fill_(wanted)
    threshold = 0
    for shift, width in _DIGITS:
        counts = _counts(parts, threshold, shift, width)
        _c_digit(
            *(counts.data_ptr(), len(parts), 1 << width, missing.data_ptr(), above.data_ptr()),
            *(equal.data_ptr(), digit.data_ptr()),
        )
        threshold = threshold << width | int(digit)
    return _Cut(threshold, above.tolist(), _share(int(missing), equal.tolist()))


def _counts(parts: Sequence[_Part], prefix: int, shift: int, width: int) -> Tensor:
    """Count the magnitudes with each digit after the prefix, by part: int64 [parts, 2**width]."""
    counts = torch.empty(len(parts), 1 << width, dtype=torch.int64)

    def count(index: int) -> None:
        part, target = parts[index], counts[index].data_ptr()
        _c_count(part.x, part.residual, part.start, part.stop, prefix, shift, width, target)

    for_each(range(len(parts)), count)
    return counts


def _share(ties: int, equal: Sequence[int]) -> list[int]:
    """Return how many ties each part may select: the first ones."""
    shares = []
    for count in equal:
        shares.append(min(count, ties))
        ties -= shares[-1]
    return shares


def _collect(parts: Sequence[_Part], cut: _Cut, values: Tensor, places: Tensor) -> None:
    sizes = [more + ties for more, ties in zip(cut.above, cut.ties, strict=True)]
    starts = [sum(sizes[:index]) for index in range(len(parts))]

    def collect(index: int) -> None:
        part, start = parts[index], starts[index]
        _c_collect(
            *(part.x, part.residual, part.names, part.start, part.stop),
            *(cut.threshold, cut.ties[index]),
            *(values[start:].data_ptr(), places[start:].data_ptr()),
        )

    for_each(range(len(parts)), collect)
