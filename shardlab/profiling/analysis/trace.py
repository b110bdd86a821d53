"""What is known of one rank's trace when it has been read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.analysis.intervals import EMPTY, Intervals, covers, intersection, merge
from shardlab.profiling.analysis.operators import Operators


class Launched(NamedTuple):
    """What ran on devices."""

    times: Intervals
    """[n, 2]; not merged"""
    launched: NDArray[np.float64]
    """when the CPU launched each [n]; its own start where the trace does not say"""

    def during(self, window: Intervals) -> Intervals:
        """The time of what was launched within `window`."""
        return merge(self.times[covers(window, self.launched)])

    def only(self, wanted: NDArray[np.bool_]) -> "Launched":
        """Some of it."""
        return Launched(self.times[wanted], self.launched[wanted])


class Collectives(NamedTuple):
    """What moved between ranks, in the order of its start."""

    times: Intervals
    """[n, 2]; not merged"""
    launched: NDArray[np.float64]
    """as in `Launched`; on the CPU the start"""
    operations: NDArray[np.str_]
    units: NDArray[np.str_]
    """empty where the trace does not say"""

    def during(self, window: Intervals) -> Intervals:
        """The time of those that were launched within `window`."""
        return merge(self.times[covers(window, self.launched)])

    def only(self, wanted: NDArray[np.bool_]) -> "Collectives":
        """Some of them."""
        return Collectives(
            self.times[wanted], self.launched[wanted], self.operations[wanted], self.units[wanted]
        )


@dataclass(frozen=True)
class Trace:
    """One rank. All times are microseconds since the same moment on all ranks of a trace."""

    steps: dict[int, Intervals]
    forward: Intervals
    """of all steps, on the CPU"""
    backward: Intervals
    kernels: Launched
    """those of NCCL excepted"""
    copies: Launched
    """to, from and on devices; fills are among them"""
    collectives: Collectives
    operators: Sequence[Operators]
    on_device: bool
    """whether kernels compute; operators on the CPU only launch them then"""

    def near(self, window: Intervals) -> "Trace":
        """With only those kernels, copies and collectives that reach into `window`."""
        first, last = window[0, 0], window[-1, 1]

        def reach(times: Intervals) -> NDArray[np.bool_]:
            return (times[:, 0] < last) & (times[:, 1] > first)

        return replace(
            self,
            kernels=self.kernels.only(reach(self.kernels.times)),
            copies=self.copies.only(reach(self.copies.times)),
            collectives=self.collectives.only(reach(self.collectives.times)),
        )

    @property
    def work(self) -> tuple[Launched, Launched, Collectives]:
        """What was launched."""
        return self.kernels, self.copies, self.collectives

    def compute(self, window: Intervals) -> Intervals:
        """The time within `window` in which anything computed."""
        if self.on_device:
            return intersection(merge(self.kernels.times), window)
        return merge(np.concatenate([EMPTY, *(each.compute(window) for each in self.operators)]))

    def communication(self, window: Intervals) -> Intervals:
        """The time within `window` in which a collective ran."""
        return intersection(merge(self.collectives.times), window)

    def copied(self, window: Intervals) -> Intervals:
        """The time within `window` in which a device copied."""
        return intersection(merge(self.copies.times), window)
