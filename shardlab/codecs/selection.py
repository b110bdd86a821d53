"""Sparse vectors: exact selection of the largest elements, residuals, and sums in a dense vector.

Selected are the k elements of largest magnitude, ties to the lower index, in ascending order
of their index; only magnitudes of at least `floor`, of which there may be fewer than k. Magnitudes
are compared as the bit patterns of |x|: infinity lies above every finite number and NaN above it.
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
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return values, float32, and positions, int32, of the largest elements of `x + residual`.

    Args:
        x: float32 [n], contiguous, n < 2**31.
        k: at most n.
        floor: smallest magnitude that is selected, as a bit pattern. If it is not 0 the host waits
            for the number of elements that reach it.
        kept: float32 [n], set to `x + residual`, or to `residual` where that is not finite; not
            the memory of `residual`.
    """
    check_floats(x, residual=residual, kept=kept)
    if not k <= x.numel() < 2**31:
        raise ValueError(f"cannot select {k} of {x.numel()} elements")
    if native.compiled(x):
        values, positions = x.new_empty(k), x.new_empty(k, dtype=torch.int32)
        count = torch.empty(1, dtype=torch.int64)
        _LARGEST(x, residual, kept, floor, values, positions, count)
        found = int(count) if floor else k  # to read a tensor takes longer than to compare
        return values[:found], positions[:found]
    if floor:
        total = x if residual is None else x + residual
        k = min(k, int(((total.view(torch.int32) & 0x7FFFFFFF) >= floor).sum()))
    return largest_reference(x, k, residual, kept)


def keep(
    x: Tensor | None,
    residual: Tensor,
    kept: Tensor,
    positions: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Write the new residual after `decoded` was sent for `values` at `positions`.

    kept[positions] = values - decoded; all other elements become x + residual if x is given. Where
    these are not finite, `kept` is the old residual.

    Args:
        residual, kept: float32 [n]; `kept` may be `residual` if x is given.
        positions: int32 [k], ascending.
        values, decoded: float32 [k].
    """
    check_floats(values, decoded=decoded)
    check_floats(residual, kept=kept, x=x)
    check_positions(positions, values)
    run = _KEEP if native.compiled(residual) else keep_reference
    run(x, residual, kept, positions, values, decoded)


def scatter_add(values: Tensor, positions: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """Add `alpha * values` to out[positions].

    Args:
        values: float32 [k], contiguous.
        positions: int32 [k], contiguous, ascending, all different and below out.numel().
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
    """Set `out` to `alpha * sum of the sparse vectors`, in their order, in one pass over it."""
    check_floats(out)
    for some, at in zip(values, positions, strict=True):
        check_floats(some)
        check_positions(at, some)
    if native.compiled(out):
        _SUM(values, positions, [some.numel() for some in values], alpha, out)
    else:
        sum_reference(values, positions, out, alpha)


@compiled_on_gpus
def largest_reference(
    x: Tensor, k: int, residual: Tensor | None = None, kept: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what `largest` does without a floor, in PyTorch."""
    wanted = x if residual is None else x + residual
    magnitude = (wanted.view(torch.int32) & 0x7FFFFFFF).long()
    # one number for magnitude and position, larger for a lower position: no ties are left
    order = torch.arange(wanted.numel(), device=wanted.device)
    ranked = (magnitude << 31) + (2**31 - 1 - order)
    positions = torch.topk(ranked, k, sorted=False).indices.sort().values
    if residual is not None and kept is not None:
        kept.copy_(torch.where(wanted.isfinite(), wanted, residual))
    return wanted[positions], positions.to(torch.int32)


@compiled_on_gpus
def keep_reference(
    x: Tensor | None,
    residual: Tensor,
    kept: Tensor,
    positions: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Run `keep` in PyTorch."""
    at, rest = positions.long(), values - decoded
    rest = torch.where(rest.isfinite(), rest, residual[at])
    if x is not None:
        wanted = x + residual
        kept.copy_(torch.where(wanted.isfinite(), wanted, residual))
    kept[at] = rest


@compiled_on_gpus
def add_reference(values: Tensor, positions: Tensor, out: Tensor, alpha: float) -> None:
    """Run `scatter_add` in PyTorch."""
    at = positions.long()
    out[at] = out[at] + values * alpha


@compiled_on_gpus
def sum_reference(
    values: Sequence[Tensor], positions: Sequence[Tensor], out: Tensor, alpha: float
) -> None:
    """Run `scatter_sum` in PyTorch."""
    total = torch.zeros_like(out)
    for some, at in zip(values, positions, strict=True):
        at = at.long()
        total[at] = total[at] + some
    out.copy_(total * alpha)


_LARGEST = kernel(
    "select_largest",
    "threads(x), Tensor x, Tensor? residual, Tensor(a!)? kept, size(x), size(values), int floor, "
    "Tensor(b!) values, Tensor(c!) positions, Tensor(d!) count",
)
_KEEP = kernel(
    "select_keep",
    "threads(residual), Tensor? x, Tensor residual, Tensor(a!) kept, size(residual), "
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
