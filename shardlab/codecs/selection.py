"""Sparse vectors: exact selection of the largest elements, residuals, and sums in a dense vector.

The selection takes the k elements of largest magnitude, ties to the lower index, in ascending order
of their index. It skips magnitudes below `floor`, so that fewer than k may remain. Magnitudes are
compared as the bit patterns of |x|: infinity is above every finite number, and NaN is above
infinity.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.compiled import compiled_on_gpus
from shardlab.kernels.native import check_floats, check_positions
from shardlab.kernels.operators import kernel


def largest(
    x: Tensor,
    k: int,
    floor: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return values, float32, and positions, int32, of the largest elements of `x + residual`.

    Args:
        x: float32 [n], contiguous, n < 2**31.
        k: Number of elements, at most n.
        floor: Smallest magnitude to select, as a bit pattern. If it is not 0, the host waits for
            the number of elements that reach it.
        new_residual: float32 [n], set to `x + residual`, or to `residual` where the sum is not
            finite. It must not share the memory of `residual`.
    """
    check_floats(x, residual=residual, new_residual=new_residual)
    if not k <= x.numel() < 2**31:
        raise ValueError(f"cannot select {k} of {x.numel()} elements")
    if native.compiled(x):
        values, positions = x.new_empty(k), x.new_empty(k, dtype=torch.int32)
        count = torch.empty(1, dtype=torch.int64)
        _LARGEST(x, residual, new_residual, floor, values, positions, count)
        selected = int(count) if floor else k  # without a floor, skip the slow read of a tensor
        return values[:selected], positions[:selected]
    if floor:
        total = x if residual is None else x + residual
        k = min(k, int(((total.view(torch.int32) & 0x7FFFFFFF) >= floor).sum()))
    return largest_reference(x, k, residual, new_residual)


def write_residual(
    x: Tensor | None,
    residual: Tensor,
    new_residual: Tensor,
    positions: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Write the new residual after `values` at `positions` were sent and decoded to `decoded`.

    Sets new_residual[positions] to values - decoded and, if there is an x, all other elements to
    x + residual. Where a difference or sum is not finite, `new_residual` becomes the old residual.

    Args:
        residual, new_residual: float32 [n]; with x they may be the same tensor.
        positions: int32 [k], ascending.
        values, decoded: float32 [k].
    """
    check_floats(values, decoded=decoded)
    check_floats(residual, new_residual=new_residual, x=x)
    check_positions(positions, values)
    run = _WRITE_RESIDUAL if native.compiled(residual) else write_residual_reference
    run(x, residual, new_residual, positions, values, decoded)


def scatter_add(values: Tensor, positions: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Add `alpha * values` to out[positions].

    Args:
        values: float32 [k], contiguous.
        positions: int32 [k], contiguous, ascending, distinct, below out.numel().
        out: float32 [n], contiguous.
    """
    check_floats(out)
    check_floats(values)
    check_positions(positions, values)
    if native.compiled(out):
        _ADD(values, positions, alpha, out)
    else:
        add_reference(values, positions, out, alpha)


def scatter_sum(
    values: list[Tensor], positions: list[Tensor], out: Tensor, alpha: float = 1.0
) -> None:
    """Set `out` to alpha times the sum of the sparse vectors, added in their order."""
    check_floats(out)
    for vector, index in zip(values, positions, strict=True):
        check_floats(vector)
        check_positions(index, vector)
    if native.compiled(out):
        _SUM(values, positions, [vector.numel() for vector in values], alpha, out)
    else:
        sum_reference(values, positions, out, alpha)


@compiled_on_gpus
def largest_reference(
    x: Tensor, k: int, residual: Tensor | None = None, new_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run `largest` without a floor in PyTorch."""
    corrected = x if residual is None else x + residual
    magnitude = (corrected.view(torch.int32) & 0x7FFFFFFF).long()
    # one sort key of magnitude and position, larger for a lower position: there are no ties
    order = torch.arange(corrected.numel(), device=corrected.device)
    ranked = (magnitude << 31) + (2**31 - 1 - order)
    positions = torch.topk(ranked, k, sorted=False).indices.sort().values
    if residual is not None and new_residual is not None:
        new_residual.copy_(torch.where(corrected.isfinite(), corrected, residual))
    return corrected[positions], positions.to(torch.int32)


@compiled_on_gpus
def write_residual_reference(
    x: Tensor | None,
    residual: Tensor,
    new_residual: Tensor,
    positions: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Run `write_residual` in PyTorch."""
    index, error = positions.long(), values - decoded
    error = torch.where(error.isfinite(), error, residual[index])
    if x is not None:
        corrected = x + residual
        new_residual.copy_(torch.where(corrected.isfinite(), corrected, residual))
    new_residual[index] = error


@compiled_on_gpus
def add_reference(values: Tensor, positions: Tensor, out: Tensor, alpha: float) -> None:
    """Run `scatter_add` in PyTorch."""
    index = positions.long()
    out[index] = out[index] + values * alpha


@compiled_on_gpus
def sum_reference(
    values: Sequence[Tensor], positions: Sequence[Tensor], out: Tensor, alpha: float
) -> None:
    """Run `scatter_sum` in PyTorch."""
    total = torch.zeros_like(out)
    for vector, index in zip(values, positions, strict=True):
        index = index.long()
        total[index] = total[index] + vector
    out.copy_(total * alpha)


_LARGEST = kernel(
    "select_largest",
    "threads(x), Tensor x, Tensor? residual, Tensor(a!)? new_residual, size(x), size(values), "
    "int floor, Tensor(b!) values, Tensor(c!) positions, Tensor(d!) count",
)
_WRITE_RESIDUAL = kernel(
    "select_keep",
    "threads(residual), Tensor? x, Tensor residual, Tensor(a!) new_residual, size(residual), "
    "Tensor positions, Tensor values, Tensor decoded, size(positions)",
)
_ADD = kernel(
    "scatter_add",
    "threads(out), Tensor values, Tensor positions, size(values), size(out), float alpha, "
    "Tensor(a!) out",
)
_SUM = kernel(
    "scatter_sum",
    "threads(out), Tensor[] values, Tensor[] positions, int[] counts, size(values), size(out), "
    "float alpha, Tensor(a!) out",
)
