"""Operators of one thread, reduced while reading to the time in which they compute.

An operator computes unless it holds one that launches or awaits a collective, a node of the
autograd engine or a labelled range: such a wrapper lasts as long as what it waits for.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.intervals import EMPTY, Intervals, intersection, merge

RESOLUTION_US = 2e-3
"""times are rounded to nanoseconds, and large floating-point numbers lose some more"""
_EVENTS = 1 << 12
"""number of events held before they are reduced"""


class OutOfOrder(Exception):
    """An event began before others that are already reduced."""


class Operators:
    """Reader of operators and labelled ranges of one thread, in the order of their start.

    Kineto writes each thread in this order. What is kept of them are the intervals of the outermost
    operators that compute, 16 bytes each.

    Args:
        patient: keeps all events until the end, so that they may come in any order.
    """

    def __init__(self, patient: bool = False) -> None:
        self._start = array("d")
        self._end = array("d")
        self._computes = array("b")
        self._limit = float("inf") if patient else _EVENTS
        self._reduced_to = -float("inf")
        self._compute: list[Intervals] = []
        """disjoint, in order"""

    def add(self, start: float, end: float, computes: bool) -> None:
        """Read one event.

        Raises:
            OutOfOrder: it is too late for that.
        """
        self._start.append(start)
        self._end.append(end)
        self._computes.append(computes)
        if len(self._start) >= self._limit:
            self._reduce(whole=False)

    def finish(self) -> None:
        """Finish: no more events follow."""
        self._reduce(whole=True)

    def compute(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which operators computed."""
        if len(window) == 0:
            return EMPTY
        first, last = window[0, 0], window[-1, 1]
        near = [
            times[np.searchsorted(times[:, 1], first) : np.searchsorted(times[:, 0], last)]
            for times in self._compute
            if times[0, 0] < last and times[-1, 1] > first
        ]
        return intersection(merge(np.concatenate([EMPTY, *near])), window)

    def _reduce(self, whole: bool) -> None:
        if not self._start:
            return
        order = np.argsort(np.frombuffer(self._start), kind="stable")
        times = np.column_stack([np.frombuffer(self._start), np.frombuffer(self._end)])[order]
        computes = np.frombuffer(self._computes, dtype=bool)[order]
        if times[0, 0] < self._reduced_to - RESOLUTION_US:
            raise OutOfOrder
        cut = len(times) if whole else _last_pause(times, computes)
        done, done_computes = times[:cut], computes[:cut]
        operators = done[done_computes]
        compute = merge(operators[~_holding(operators, done[~done_computes])])
        if len(compute):
            self._compute.append(compute)
        if cut:
            self._reduced_to = done[-1, 0]
        if cut < len(times) // 2:
            # one operator lasts longer than all held events
            self._limit *= 2
        self._start = array("d", times[cut:, 0].tobytes())
        self._end = array("d", times[cut:, 1].tobytes())
        self._computes = array("b", computes[cut:].tobytes())


def _last_pause(times: Intervals, computes: NDArray[np.bool_]) -> int:
    """Return the last held event before which no operator runs; 0 if one always does."""
    ends = np.maximum.accumulate(np.where(computes, times[:, 1], -np.inf))
    start = times[:, 0]
    pauses = (start[1:] > start[:-1] + RESOLUTION_US) & (ends[:-1] <= start[1:])
    found = np.flatnonzero(pauses)
    return int(found[-1]) + 1 if len(found) else 0


def _holding(outer: Intervals, inner: Intervals) -> NDArray[np.bool_]:
    """Return which of the `outer` events contain one of the `inner` ones, sorted by start."""
    # the first end among all that start at this one or later
    first_end = np.append(np.minimum.accumulate(inner[::-1, 1])[::-1], np.inf)
    later = np.searchsorted(inner[:, 0], outer[:, 0] - RESOLUTION_US)
    return np.asarray(first_end[later] <= outer[:, 1] + RESOLUTION_US)
