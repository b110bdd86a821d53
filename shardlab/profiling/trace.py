"""A merged trace as compact columns per rank, read as a stream."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardlab.core.errors import UserError
from shardlab.profiling.intervals import Intervals
from shardlab.profiling.trace_file import Event, read_events, read_header

OPERATOR, ANNOTATION, KERNEL, COPY = range(4)
"""kinds of events: operator on the CPU, labelled range on the CPU, device kernel, device copy"""

_KINDS = {
    "cpu_op": OPERATOR,
    "user_annotation": ANNOTATION,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
}
_WORKER = "pt_gloo_runloop"
"""name of the threads on which gloo carries collectives out"""
_RESOLUTION_US = 2e-3
"""times are rounded to nanoseconds and lose some more as large floating-point numbers"""


@dataclass(frozen=True)
class Trace:
    """The timed events of one rank, one element of each column per event."""

    times: Intervals
    """start and end, microseconds [n, 2]; not merged"""
    kind: NDArray[np.int8]
    thread: NDArray[np.int32]
    """number of the thread (or device stream)"""
    name: NDArray[np.int32]
    """position in `names`"""
    names: tuple[str, ...]
    workers: frozenset[int]
    """threads that carry out collectives"""

    def named(self, wanted: Callable[[str], bool]) -> NDArray[np.bool_]:
        """Which events have a wanted name."""
        return np.fromiter(map(wanted, self.names), bool, len(self.names))[self.name]


def read_trace(path: str | Path) -> dict[int, Trace]:
    """The events of every rank of a merged trace.

    Raises:
        UserError: no merged trace, not whole, or without events.
    """
    ranks = read_header(path, "ranks", None)
    if not ranks:
        raise UserError(
            f"{path}: names no ranks: merge the traces with shardlab.profiling.merge first"
        )
    columns = {rank: _Columns() for rank in sorted(set(ranks.values()))}
    of_process = {int(pid): columns[rank] for pid, rank in ranks.items()}
    for event in read_events(path):
        if event.get("pid") in of_process:
            of_process[event["pid"]].add(event)
    for rank, found in columns.items():
        if not found.kind:
            raise UserError(f"{path}: no timed events of rank {rank}: trace the run again")
    return {rank: found.finish() for rank, found in columns.items()}


@dataclass
class _Columns:
    """The columns of one rank while they grow."""

    start: array = field(default_factory=lambda: array("d"))
    duration: array = field(default_factory=lambda: array("d"))
    kind: array = field(default_factory=lambda: array("b"))
    thread: array = field(default_factory=lambda: array("i"))
    name: array = field(default_factory=lambda: array("i"))
    threads: dict[object, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)

    def add(self, event: Event) -> None:
        if event["ph"] == "M":
            if event["name"] == "thread_name" and _WORKER in event["args"]["name"]:
                self.workers.add(self._thread(event))
            return
        kind = _KINDS.get(event.get("cat", ""))
        if event["ph"] != "X" or kind is None:
            return
        self.start.append(event["ts"])
        self.duration.append(event["dur"])
        self.kind.append(kind)
        self.thread.append(self._thread(event))
        self.name.append(self.names.setdefault(event["name"], len(self.names)))

    def _thread(self, event: Event) -> int:
        return self.threads.setdefault((event["pid"], event["tid"]), len(self.threads))

    def finish(self) -> Trace:
        # from the first event on: large numbers have no digits left for nanoseconds
        start = np.array(self.start)
        start -= start.min()
        return Trace(
            times=np.column_stack([start, start + np.array(self.duration)]),
            kind=np.array(self.kind, dtype=np.int8),
            thread=np.array(self.thread, dtype=np.int32),
            name=np.array(self.name, dtype=np.int32),
            names=tuple(self.names),
            workers=frozenset(self.workers),
        )


def holding(trace: Trace, outer: NDArray[np.bool_], inner: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the `outer` events hold one of the `inner` events of their thread, at any depth."""
    result = np.zeros(len(outer), dtype=bool)
    for thread in np.unique(trace.thread[inner]):
        of_thread = trace.thread == thread
        held = trace.times[inner & of_thread]
        held = held[np.argsort(held[:, 0])]
        # the first end among all that start at this one or later
        first_end = np.append(np.minimum.accumulate(held[::-1, 1])[::-1], np.inf)
        holders = np.flatnonzero(outer & of_thread)
        start, end = trace.times[holders].T
        later = np.searchsorted(held[:, 0], start - _RESOLUTION_US)
        result[holders] = first_end[later] <= end + _RESOLUTION_US
    return result
