"""Events on devices and the times of their launches, in growing columns."""

from array import array

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.analysis.intervals import Intervals
from shardlab.profiling.traces.trace_file import Event


class Device:
    """Growing columns of events on devices."""

    def __init__(self) -> None:
        self.start = array("d")
        self.end = array("d")
        self.correlation = array("q")

    def add(self, event: Event, start: float, end: float) -> None:
        """Append an event; times in the unit of the reader."""
        self.start.append(start)
        self.end.append(end)
        self.correlation.append(event.get("args", {}).get("correlation", -1))

    @property
    def times(self) -> Intervals:
        """Starts and ends, [n, 2]."""
        return np.column_stack([np.array(self.start), np.array(self.end)])


class Launches:
    """Times and threads in which the CPU launched kernels."""

    def __init__(self) -> None:
        self._correlation = array("q")
        self._start = array("d")
        self._thread = array("q")

    def add(self, event: Event, start: float) -> None:
        """Append a launch."""
        correlation = event.get("args", {}).get("correlation")
        if correlation is not None:
            self._correlation.append(correlation)
            self._start.append(start)
            self._thread.append(event["tid"])

    def of(self, found: Device) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return time and thread of the launch of each event; its start and -1 where unknown."""
        known = np.array(self._correlation)
        order = np.argsort(known)
        wanted = np.array(found.correlation)
        if len(known) == 0 or len(wanted) == 0:
            return np.array(found.start), np.full(len(wanted), -1)
        place = np.searchsorted(known[order], wanted).clip(max=len(known) - 1)
        launch = order[place]
        there = known[launch] == wanted
        return (
            np.where(there, np.array(self._start)[launch], np.array(found.start)),
            np.where(there, np.array(self._thread)[launch], -1),
        )
