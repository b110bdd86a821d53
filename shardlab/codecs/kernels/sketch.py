"""Count sketches: linear summaries of a vector by which its largest elements are found.

A table has `rows` rows of `buckets` float32 numbers. With b = the 32 random bits of element i under
the two key words of a row (`shardlab.codecs.kernels.random`):

* bucket(i) = floor((b >> 1) * buckets / 2**31); sign(i) = -1 if b is odd, else 1;
* add: table[row][bucket(i)] += sign(i) * x_i, in float32, in the order of i;
* estimate of x_i: the median over rows of sign(i) * table[row][bucket(i)]; of an even number of
  rows the mean of the two in the middle (0.5 * lower + 0.5 * upper).

Charikar, Chen and Farach-Colton 2002; hashes are computed, so only the table is stored.
Tables of the same keys can be added. A NaN or an infinity makes its buckets NaN or infinite.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.native import INT, POINTER, function
from shardlab.codecs.kernels.operators import check_floats, register
from shardlab.codecs.kernels.parallel import for_ranges
from shardlab.codecs.kernels.random import random_bits

MOST_ROWS = 15  # csrc/sketch.cpp
Keys = Sequence[tuple[int, int]]
"""two words for each row"""


def add(x: Tensor, keys: Keys, table: Tensor) -> None:
    """Add the sketch of `x` to `table`.

    Args:
        x: float32 [n], contiguous.
        table: float32 [rows, buckets], contiguous.
    """
    _ADD(x, _flat(keys), table)


def estimate(table: Tensor, keys: Keys, n: int) -> Tensor:
    """Return the estimates of the elements 0 to n - 1: float32 [n]."""
    estimates = table.new_empty(n)
    _ESTIMATE(table, _flat(keys), estimates)
    return estimates


def add_reference(x: Tensor, keys: list[int], table: Tensor) -> None:
    """Run the operator `sketch_add` in PyTorch."""
    for row, (k0, k1) in zip(table, _pairs(keys), strict=True):
        bucket, sign = _places(x.numel(), table.shape[1], k0, k1, x.device)
        if x.is_cuda:
            # sorted before it is summed: atomic additions would come in any order
            row.index_put_((bucket,), x * sign, accumulate=True)
        else:
            row.index_add_(0, bucket, x * sign)


def estimate_reference(table: Tensor, keys: list[int], estimates: Tensor) -> None:
    """Run the operator `sketch_estimate` in PyTorch."""
    n, rows = estimates.numel(), len(table)
    values = torch.empty(rows, n, device=table.device)
    for row, (k0, k1), into in zip(table, _pairs(keys), values, strict=True):
        bucket, sign = _places(n, table.shape[1], k0, k1, table.device)
        torch.mul(row[bucket], sign, out=into)
    values = values.sort(0).values
    estimates.copy_(0.5 * values[(rows - 1) // 2] + 0.5 * values[rows // 2] + 0.0)


def _places(n: int, buckets: int, k0: int, k1: int, device: torch.device) -> tuple[Tensor, Tensor]:
    bits = random_bits(n, k0, k1, device)
    return ((bits >> 1) * buckets) >> 31, 1.0 - 2.0 * (bits & 1)


def _flat(keys: Keys) -> list[int]:
    return [word for key in keys for word in key]


def _pairs(keys: list[int]) -> list[tuple[int, int]]:
    return list(zip(keys[::2], keys[1::2], strict=True))


def _check(table: Tensor, keys: list[int], values: Tensor) -> None:
    check_floats(values=values)
    if table.dtype != torch.float32 or table.dim() != 2 or not table.is_contiguous():
        raise ValueError(f"table must be contiguous float32 [rows, buckets], not {table.shape}")
    if not 1 <= len(table) <= MOST_ROWS or len(keys) != 2 * len(table) or not table.shape[1]:
        raise ValueError(f"a table of {tuple(table.shape)} does not fit {len(keys)} key words")
    if table.device != values.device:
        raise ValueError(f"table is on {table.device}, the values on {values.device}")


def _run_add(x: Tensor, keys: list[int], table: Tensor) -> None:
    _check(table, keys, x)
    n, (rows, buckets) = x.numel(), table.shape
    if not native.compiled(x):
        add_reference(x, keys, table)
        return

    def part(start: int, stop: int) -> None:
        for row in range(start // n, stop // n):
            k0, k1 = keys[2 * row : 2 * row + 2]
            _C_ADD(x.data_ptr(), n, buckets, k0, k1, table[row].data_ptr())

    if n:
        # whole rows for each thread, since a bucket's sum has one order
        for_ranges(n * rows, n, part)


def _run_estimate(table: Tensor, keys: list[int], estimates: Tensor) -> None:
    _check(table, keys, estimates)
    if not native.compiled(table):
        triton = native.triton_kernels(table)
        (triton.sketch.estimate if triton else estimate_reference)(table, keys, estimates)
        return
    (rows, buckets), words = table.shape, (ctypes.c_uint32 * len(keys))(*keys)

    def part(start: int, stop: int) -> None:
        _C_ESTIMATE(table.data_ptr(), rows, buckets, words, start, stop, estimates.data_ptr())

    for_ranges(estimates.numel(), 1, part)


_WORD = ctypes.c_uint32
_C_ADD = function("sketch_add", POINTER, INT, INT, _WORD, _WORD, POINTER)
_C_ESTIMATE = function("sketch_estimate", POINTER, INT, INT, POINTER, INT, INT, POINTER)
_ADD = register("sketch_add(Tensor x, int[] keys, Tensor(a!) table) -> ()", _run_add)
_ESTIMATE = register(
    "sketch_estimate(Tensor table, int[] keys, Tensor(a!) estimates) -> ()", _run_estimate
)
