"""Exact selection of the largest elements of a vector by magnitude.

Selected are the k elements of largest magnitude, ties to the lower index, in ascending order
of their index; only magnitudes of at least `floor`, of which there may be fewer than k. Magnitudes
are compared as the bit patterns of |x|: infinity lies above every finite number and NaN above it.
"""

import torch
from torch import Tensor

from shardlab.codecs.kernels import native, radix
from shardlab.codecs.kernels.native import INT, POINTER, address, function
from shardlab.codecs.kernels.operators import check_floats, register
from shardlab.codecs.kernels.parallel import for_ranges

_INFINITE = 0x7F800000
_BLOCK = 1024  # csrc/select.cpp

_c_keep = function(
    "select_keep", *(POINTER, POINTER, POINTER, INT, INT, POINTER, POINTER, POINTER, INT)
)


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
        floor: smallest magnitude that is selected, as a bit pattern.
        kept: float32 [n], set to `x + residual`, or to `residual` where that is not finite; not
            the memory of `residual`.
    """
    values = x.new_empty(k)
    places = torch.empty(k, dtype=torch.int32, device=x.device)
    count = torch.empty(1, dtype=torch.int64)
    _largest(x, residual, kept, floor, values, places, count)
    if not floor:  # there are k of at least nothing: the host need not look at a count
        return values, places
    return values[: int(count)], places[: int(count)]


def not_finite(x: Tensor, residual: Tensor | None = None, kept: Tensor | None = None) -> Tensor:
    """Count the elements of `x + residual` that are not finite, as int64 [1] on their device;
    `kept` as in `largest`."""
    count = torch.empty(1, dtype=torch.int64, device=x.device)
    _not_finite(x, residual, kept, count)
    return count


def keep(
    x: Tensor | None,
    residual: Tensor,
    kept: Tensor,
    places: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Write the new residual after `decoded` was sent for `values` at `places` of `x + residual`.

    kept[places] = values - decoded; all other elements become x + residual if x is given. Where
    these are not finite, `kept` is the old residual.

    Args:
        residual, kept: float32 [n]; `kept` may be `residual` if x is given.
        places: int32 [k], ascending.
        values, decoded: float32 [k].
    """
    _keep(x, residual, kept, places, values, decoded)


def largest_reference(
    x: Tensor,
    residual: Tensor | None,
    kept: Tensor | None,
    floor: int,
    values: Tensor,
    places: Tensor,
    count: Tensor,
) -> None:
    """Run the operator `select_largest` in PyTorch."""
    given = x if residual is None else x + residual
    magnitude = given.view(torch.int32) & 0x7FFFFFFF
    found = values.numel()
    if floor:
        found = min(int((magnitude >= floor).sum()), found)
    count.fill_(found)
    if found:
        place = _places_of_largest(given, magnitude, found)
        values[:found] = given[place]
        places[:found] = place
    if residual is not None and kept is not None:
        torch.where(given.isfinite(), given, residual, out=kept)


def _places_of_largest(given: Tensor, magnitude: Tensor, k: int) -> Tensor:
    """Return int64 [k], ascending."""
    # one number for magnitude and place, larger for a lower place: ties need no look by the host
    places = torch.arange(magnitude.numel(), device=given.device)
    ranked = (magnitude.long() << 31) + (2**31 - 1 - places)
    return torch.topk(ranked, k, sorted=False).indices.sort().values


def keep_reference(
    x: Tensor | None,
    residual: Tensor,
    kept: Tensor,
    places: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    """Run the operator `select_keep` in PyTorch."""
    place, rest = places.long(), values - decoded
    rest = torch.where(rest.isfinite(), rest, residual[place])
    if x is not None:
        given = x + residual
        torch.where(given.isfinite(), given, residual, out=kept)
    kept[place] = rest


def _run_largest(
    x: Tensor,
    residual: Tensor | None,
    kept: Tensor | None,
    floor: int,
    values: Tensor,
    places: Tensor,
    count: Tensor,
) -> None:
    _check(x, residual, kept)
    if values.numel() > x.numel() or places.dtype != torch.int32 or len(places) != len(values):
        raise ValueError(f"cannot select {values.numel()} of {x.numel()} elements")
    if native.compiled(x):
        count.fill_(radix.select(x, residual, kept, floor, values, places))
    else:
        triton = native.triton_kernels(x)
        run = triton.select.largest if triton else largest_reference
        run(x, residual, kept, floor, values, places, count)


def _run_not_finite(x: Tensor, residual: Tensor | None, kept: Tensor | None, count: Tensor) -> None:
    _check(x, residual, kept)
    if native.compiled(x):
        count.fill_(radix.count_at_least(x, residual, kept, _INFINITE))
        return
    if (triton := native.triton_kernels(x)) is not None:
        count.copy_(triton.select.at_least(x, residual, kept, _INFINITE))
        return
    given = x if residual is None else x + residual
    count.copy_((~given.isfinite()).sum())
    if residual is not None and kept is not None:
        torch.where(given.isfinite(), given, residual, out=kept)


def _run_keep(
    x: Tensor | None,
    residual: Tensor,
    kept: Tensor,
    places: Tensor,
    values: Tensor,
    decoded: Tensor,
) -> None:
    check_floats(values=values, decoded=decoded)
    check_floats(residual=residual, kept=kept, x=x)
    if places.dtype != torch.int32 or len(places) != len(values) or not places.is_contiguous():
        raise ValueError("places must be a contiguous int32 vector, one for each value")
    if not native.compiled(residual):
        triton = native.triton_kernels(residual)
        run = triton.select.keep if triton else keep_reference
        run(x, residual, kept, places, values, decoded)
        return
    source = address(x)
    at = (places.data_ptr(), values.data_ptr(), decoded.data_ptr(), len(places))

    def part(start: int, stop: int) -> None:
        _c_keep(source, residual.data_ptr(), kept.data_ptr(), start, stop, *at)

    for_ranges(residual.numel(), _BLOCK, part)


def _check(x: Tensor, residual: Tensor | None, kept: Tensor | None) -> None:
    check_floats(x=x, residual=residual, kept=kept)
    if x.numel() >= 2**31:
        raise ValueError(f"places are numbers of 31 bits: {x.numel()} elements are too many")


_largest = register(
    "select_largest(Tensor x, Tensor? residual, Tensor(a!)? kept, int floor, Tensor(b!) values, "
    "Tensor(c!) places, Tensor(d!) count) -> ()",
    _run_largest,
)
_not_finite = register(
    "select_not_finite(Tensor x, Tensor? residual, Tensor(a!)? kept, Tensor(b!) count) -> ()",
    _run_not_finite,
)
_keep = register(
    "select_keep(Tensor? x, Tensor residual, Tensor(a!) kept, Tensor places, Tensor values, "
    "Tensor decoded) -> ()",
    _run_keep,
)
