"""Contents of one rank's trace, and the columns in which events on devices are read."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.clues import Clues
from shardlab.profiling.intervals import EMPTY, Intervals, covers, intersection, merge
from shardlab.profiling.operators import Operators
from shardlab.profiling.trace_file import Event


class Launched(NamedTuple):
    """Events on devices."""

    times: Intervals
    """start and end, [n, 2]; not merged"""
    launched: NDArray[np.float64]
    """time of the launch by the CPU, [n]; where the trace does not say, -inf if it was before the
    trace, otherwise the event's own start"""
    kinds: NDArray[np.str_] = np.empty(0, dtype=np.str_)
    """of copies: HtoD, DtoH, ..., Memset, [n]"""

    def during(self, window: Intervals) -> Intervals:
        """Return the time of events that were launched within `window`."""
        return merge(self.times[covers(window, self.launched)])

    def only(self, wanted: NDArray[np.bool_]) -> "Launched":
        """Select events."""
        kinds = self.kinds[wanted] if len(self.kinds) else self.kinds
        return Launched(self.times[wanted], self.launched[wanted], kinds)


class Collectives(NamedTuple):
    """Communication between ranks, in the order of its start."""

    times: Intervals
    """start and end, [n, 2]; not merged"""
    launched: NDArray[np.float64]
    """as in `Launched`; of gloo's workers the time of the call, if that is known"""
    operations: NDArray[np.str_]
    units: NDArray[np.str_]
    """empty where the trace does not say"""

    def during(self, window: Intervals) -> Intervals:
        """Return the time of the collectives that were launched within `window`."""
        return merge(self.times[covers(window, self.launched)])

    def only(self, wanted: NDArray[np.bool_]) -> "Collectives":
        """Select collectives."""
        return Collectives(
            self.times[wanted], self.launched[wanted], self.operations[wanted], self.units[wanted]
        )


@dataclass(frozen=True)
class Trace:
    """Trace of one rank; times are microseconds from the same origin on all ranks of a trace."""

    steps: dict[int, Intervals]
    forward: Intervals
    """of all steps, on the CPU"""
    backward: Intervals
    kernels: Launched
    """kernels except NCCL's"""
    copies: Launched
    """copies to, from and on devices, fills included"""
    collectives: Collectives
    operators: Sequence[Operators]
    on_device: bool
    """whether kernels compute; CPU operators then only launch them"""
    clues: Clues = field(default_factory=Clues)
    host_steps: dict[int, Intervals] | None = None
    """the steps on the CPU, if a device runs them later"""

    def near(self, window: Intervals) -> "Trace":
        """Return the trace with only the kernels, copies and collectives that overlap `window`."""
        first, last = window[0, 0], window[-1, 1]

        def reach(times: Intervals) -> NDArray[np.bool_]:
            overlaps: NDArray[np.bool_] = (times[:, 0] < last) & (times[:, 1] > first)
            return overlaps

        return replace(
            self,
            kernels=self.kernels.only(reach(self.kernels.times)),
            copies=self.copies.only(reach(self.copies.times)),
            collectives=self.collectives.only(reach(self.collectives.times)),
        )

    @property
    def work(self) -> tuple[Launched, Launched, Collectives]:
        """All events on devices."""
        return self.kernels, self.copies, self.collectives

    def compute(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which anything computed."""
        if self.on_device:
            return intersection(merge(self.kernels.times), window)
        return merge(np.concatenate([EMPTY, *(each.compute(window) for each in self.operators)]))

    def communication(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which a collective ran."""
        return intersection(merge(self.collectives.times), window)

    def copied(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which a device copied."""
        return intersection(merge(self.copies.times), window)


class Device:
    """Growing columns of events on devices."""

    def __init__(self) -> None:
        self.start = array("d")
        self.end = array("d")
        self.correlation = array("q")
        self.stream = array("q")
        self._streams: dict[int | str, int] = {}

    def add(self, event: Event, start: float, end: float) -> None:
        """Append an event; times in the unit of the reader."""
        self.start.append(start)
        self.end.append(end)
        self.correlation.append(event.get("args", {}).get("correlation", -1))
        self.stream.append(self._streams.setdefault(event["tid"], len(self._streams)))

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

    def __len__(self) -> int:
        return len(self._start)

    def of(self, found: Device) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return time and thread of the launch of each event; -1 where the thread is unknown.

        A stream runs in the order of launches. So what ran on it without a known launch, before
        anything with one, was launched before the trace began.
        """
        known = np.array(self._correlation)
        order = np.argsort(known)
        wanted, start = np.array(found.correlation), np.array(found.start)
        if len(known) == 0 or len(wanted) == 0:
            return start, np.full(len(wanted), -1)
        place = np.searchsorted(known[order], wanted).clip(max=len(known) - 1)
        launch = order[place]
        there = known[launch] == wanted
        stream = np.array(found.stream)
        first = np.full(stream.max() + 1, np.inf)
        np.minimum.at(first, stream[there], start[there])
        before = np.isfinite(first[stream]) & (start < first[stream])
        return (
            np.where(there, np.array(self._start)[launch], np.where(before, -np.inf, start)),
            np.where(there, np.array(self._thread)[launch], -1),
        )
