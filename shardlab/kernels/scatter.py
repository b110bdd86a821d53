"""Sums of sparse vectors, given as values at ascending places, in a dense one."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.native import FLOAT, INT, POINTER, function
from shardlab.kernels.operators import check_floats, register
from shardlab.kernels.parallel import for_ranges

_TILE = 1 << 12  # csrc/scatter.cpp

_c_scatter = function(
    "scatter_sum", POINTER, POINTER, POINTER, INT, INT, INT, FLOAT, ctypes.c_int, POINTER, POINTER
)


def scatter_add(values: Tensor, places: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """out[places] += alpha * values.

    Args:
        values: float32 [k], contiguous.
        places: int32 [k], contiguous, ascending, all different and below out.numel().
        out: float32 [n], contiguous.
    """
    _scatter([values], [places], out, alpha, True)


def scatter_sum(
    values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float = 1.0
) -> None:
    """out = alpha * (the sum of the sparse vectors, in their order), in one pass over `out`."""
    _scatter(list(values), list(places), out, alpha, False)


def scatter_reference(
    values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float, add: bool
) -> None:
    """The operator `scatter_sum` in PyTorch."""
    if add:
        for each, place in zip(values, places, strict=True):
            out[place.long()] += each * alpha
        return
    out.zero_()
    for each, place in zip(values, places, strict=True):
        out[place.long()] += each
    if alpha != 1.0:
        out.mul_(alpha)


def _run(
    values: Sequence[Tensor], places: Sequence[Tensor], out: Tensor, alpha: float, add: bool
) -> None:
    check_floats(out=out)
    for each, place in zip(values, places, strict=True):
        check_floats(values=each)
        if place.dtype != torch.int32 or place.shape != each.shape or not place.is_contiguous():
            raise ValueError("places must be a contiguous int32 vector, one for each value")
    if not native.compiled(out):
        scatter_reference(values, places, out, alpha, add)
        return
    count = len(values)
    addresses = ctypes.c_void_p * count
    from_values = addresses(*(each.data_ptr() for each in values))
    from_places = addresses(*(place.data_ptr() for place in places))
    sizes = (ctypes.c_int64 * count)(*(each.numel() for each in values))

    def part(start: int, stop: int) -> None:
        cursors = (ctypes.c_int64 * count)()
        _c_scatter(
            *(from_values, from_places, sizes, count, start, stop, alpha, add, cursors),
            out.data_ptr(),
        )

    for_ranges(out.numel(), _TILE, part)


_scatter = register(
    "scatter_sum(Tensor[] values, Tensor[] places, Tensor(a!) out, float alpha, bool add) -> ()",
    _run,
)
