"""Sums of sparse vectors, given as values at ascending positions, in a dense one."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.native import FLOAT, INT, POINTER, addresses, function
from shardlab.codecs.kernels.operators import check_floats, register
from shardlab.codecs.kernels.parallel import for_ranges

_TILE = 1 << 12  # csrc/scatter.cpp

_c_sum = function("scatter_sum", POINTER, POINTER, POINTER, INT, INT, INT, FLOAT, POINTER, POINTER)
_c_add = function("scatter_add", POINTER, POINTER, INT, INT, INT, FLOAT, POINTER)


def scatter_add(values: Tensor, places: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Add `alpha * values` to out[places].

    Args:
        values: float32 [k], contiguous.
        places: int32 [k], contiguous, ascending, all different and below out.numel().
        out: float32 [n], contiguous.
    """
    _add(values, places, out, alpha)


def scatter_sum(
    values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float = 1.0
) -> None:
    """Set `out` to `alpha * sum of the sparse vectors`, in their order, in one pass over it."""
    _sum(list(values), list(places), out, alpha)


def sum_reference(
    values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float
) -> None:
    """Run the operator `scatter_sum` in PyTorch."""
    out.zero_()
    for each, place in zip(values, places, strict=True):
        out[place.long()] += each
    out.mul_(alpha)


def add_reference(values: Tensor, places: Tensor, out: Tensor, alpha: float) -> None:
    """Run the operator `scatter_add` in PyTorch."""
    out[places.long()] += values * alpha


def _run_sum(values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float) -> None:
    check_floats(out=out)
    for each, place in zip(values, places, strict=True):
        _check(each, place)
    if not native.compiled(out):
        triton = native.triton_kernels(out)
        (triton.scatter.add_all if triton else sum_reference)(values, places, out, alpha)
        return
    count = len(values)
    from_values, from_places = addresses(values), addresses(places)
    sizes = (ctypes.c_int64 * count)(*(each.numel() for each in values))

    def part(start: int, stop: int) -> None:
        cursors = (ctypes.c_int64 * count)()
        _c_sum(
            *(from_values, from_places, sizes, count, start, stop, alpha, cursors),
            out.data_ptr(),
        )

    for_ranges(out.numel(), _TILE, part)


def _run_add(values: Tensor, places: Tensor, out: Tensor, alpha: float) -> None:
    check_floats(out=out)
    _check(values, places)
    if not native.compiled(out):
        triton = native.triton_kernels(out)
        (triton.scatter.add if triton else add_reference)(values, places, out, alpha)
        return

    def part(start: int, stop: int) -> None:
        _c_add(
            *(values.data_ptr(), places.data_ptr(), values.numel(), start, stop, alpha),
            out.data_ptr(),
        )

    for_ranges(out.numel(), _TILE, part)


def _check(values: Tensor, places: Tensor) -> None:
    check_floats(values=values)
    if places.dtype != torch.int32 or places.shape != values.shape or not places.is_contiguous():
        raise ValueError("places must be a contiguous int32 vector, one for each value")


_sum = register(
    "scatter_sum(Tensor[] values, Tensor[] places, Tensor(a!) out, float alpha) -> ()", _run_sum
)
_add = register(
    "scatter_add(Tensor values, Tensor places, Tensor(a!) out, float alpha) -> ()", _run_add
)
