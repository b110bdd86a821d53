"""Time in which the operators of a thread compute.

An operator computes unless it holds one that launches or awaits a collective, a node of the
autograd engine or a labelled range: such a wrapper lasts as long as what it waits for.
"""

from array import array

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.intervals import Intervals, merge

RESOLUTION_US = 2e-3
"""times are rounded to nanoseconds, and large floating-point numbers lose some more"""


class Operators:
    """Operators and labelled ranges of one thread, in any order."""

    def __init__(self) -> None:
        self._times = array("d")
        """start, end, start, end, ..."""
        self._computes = array("b")

    def add(self, start: float, end: float, computes: bool) -> None:
        """Append an event."""
        self._times.extend((start, end))
        self._computes.append(computes)

    def compute(self) -> Intervals:
        """Return the time in which the operators compute."""
        times = np.array(self._times).reshape(-1, 2)
        order = np.argsort(times[:, 0])
        times, computes = times[order], np.array(self._computes, dtype=bool)[order]
        operators = times[computes]
        return merge(operators[~_holding(operators, times[~computes])])


def _holding(outer: Intervals, inner: Intervals) -> NDArray[np.bool_]:
    """Return which of the `outer` events contain one of the `inner` ones, sorted by start."""
    # the first end among all that start at this one or later
    first_end = np.append(np.minimum.accumulate(inner[::-1, 1])[::-1], np.inf)
    later = np.searchsorted(inner[:, 0], outer[:, 0] - RESOLUTION_US)
    return np.asarray(first_end[later] <= outer[:, 1] + RESOLUTION_US)
