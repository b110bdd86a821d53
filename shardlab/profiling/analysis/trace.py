"""Contents of one rank's trace after reading."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.analysis.intervals import EMPTY, Intervals, covers, intersection, merge
from shardlab.profiling.analysis.operators import Operators


class Launched(NamedTuple):
    """Events on devices."""

    times: Intervals
    """start and end, [n, 2]; not merged"""
    launched: NDArray[np.float64]
    """time of the launch by the CPU, [n]; the event's own start where the trace does not say"""

    def during(self, window: Intervals) -> Intervals:
        """Return the time of events that were launched within `window`."""
        return merge(self.times[covers(window, self.launched)])

    def only(self, wanted: NDArray[np.bool_]) -> "Launched":
        """Select events."""
        return Launched(self.times[wanted], self.launched[wanted])


class Collectives(NamedTuple):
    """Communication between ranks, in the order of its start."""

    times: Intervals
    """start and end, [n, 2]; not merged"""
    launched: NDArray[np.float64]
    """as in `Launched`; on the CPU the start"""
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
