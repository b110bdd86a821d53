"""Arithmetic of sets of time, as sorted disjoint intervals: float64 arrays [n, 2] of start and end.

An instant has no length, so it does not matter whether an interval holds its ends. Empty intervals
are dropped, and touching intervals are merged.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
_Mask = NDArray[np.bool_]

EMPTY: Intervals = np.empty((0, 2))
RESOLUTION_US = 2e-3
"""Resolution of times: they are rounded to nanoseconds, and large floats lose some digits more."""


def times_of(events: NDArray[np.void]) -> Intervals:
    """Return start and end of events, in their order; they may overlap."""
    return np.column_stack([events["start"], events["end"]])


def merge(raw: Intervals) -> Intervals:
    """Return intervals [n, 2], which may overlap and be in any order, as a set."""
    raw = raw[raw[:, 1] > raw[:, 0]]
    if len(raw) == 0:
        return EMPTY
    raw = raw[np.argsort(raw[:, 0], kind="stable")]
    reach = np.maximum.accumulate(raw[:, 1])
    first = np.concatenate([[True], raw[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([raw[first, 0], reach[last]])


def union(a: Intervals, b: Intervals) -> Intervals:
    """Return the union of `a` and `b`."""
    return merge(np.concatenate([a, b]))


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the intersection of `a` and `b`."""
    return _combine(a, b, lambda in_a, in_b: in_a & in_b)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the time in `a` that is not in `b`."""
    return _combine(a, b, lambda in_a, in_b: in_a & ~in_b)


def length(a: Intervals) -> float:
    """Return the total length, in the unit of the bounds."""
    return float((a[:, 1] - a[:, 0]).sum())


def covers(a: Intervals, times: NDArray[np.float64]) -> _Mask:
    """Return whether `a` contains the time just after each of `times`."""
    begun = np.searchsorted(a[:, 0], times, side="right")
    ended = np.searchsorted(a[:, 1], times, side="right")
    return begun > ended


def _combine(a: Intervals, b: Intervals, operation: Callable[[_Mask, _Mask], _Mask]) -> Intervals:
    """Combine two sets; membership in each is constant between neighbouring bounds."""
    bounds = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    inside = np.concatenate([[False], operation(covers(a, bounds), covers(b, bounds)), [False]])
    starts, ends = inside[1:] & ~inside[:-1], inside[:-1] & ~inside[1:]
    return np.column_stack([bounds[starts[:-1]], bounds[ends[:-1]]])
