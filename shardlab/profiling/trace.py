"""Contents of one rank's trace, the events that tell its steps and passes, and their readers."""

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.intervals import EMPTY, Intervals, covers, intersection, merge
from shardlab.profiling.trace_file import Event

ENGINE, OPTIMIZER, ASIDE = "engine", "optimizer", "aside"
_NAMES = {
    # every node that the engine runs, hooks included (torch/csrc/autograd/engine.cpp)
    "autograd::engine::evaluate_function": ENGINE,
    # what FSDP2 and FSDP1 do after the last node
    "FSDP::post_backward": ENGINE,
    "FullyShardedDataParallel._post_backward": ENGINE,
    # written by every torch.optim.Optimizer and by DataLoader
    "Optimizer.step#": OPTIMIZER,
    "Optimizer.zero_grad#": ASIDE,
    "enumerate(DataLoader)#": ASIDE,
}
ENGINE_THREAD = "pt_autograd"
"""in the names of the threads of the autograd engine that launch work on devices"""
EVER = np.array([[-np.inf, np.inf]])


@cache
def clue_of(name: str) -> str:
    """Return what an operator or a range tells; empty if nothing."""
    return next((clue for start, clue in _NAMES.items() if name.startswith(start)), "")


@dataclass(frozen=True)
class Clues:
    """Events of one rank that tell its steps and passes; times on the CPU."""

    whole: Intervals = field(default_factory=lambda: EMPTY)
    """from the first event to the last"""
    engine: Intervals = field(default_factory=lambda: EMPTY)
    """nodes of the autograd engine"""
    optimizer: Mapping[str, Intervals] = field(default_factory=dict)
    """calls of `Optimizer.step`, by annotation"""
    aside: Intervals = field(default_factory=lambda: EMPTY)
    """neither pass: `zero_grad`, loading of batches"""
    host: Intervals = field(default_factory=lambda: EMPTY)
    """when operators of the thread that runs the steps computed"""
    calls: int = 0
    """of collectives, by c10d's operators"""
    launches: int = 0
    """of work on devices"""
    unlaunched: int = 0
    """kernels and copies without a launch in the trace"""
    earlier: int = 0
    """those of them that were launched before the trace began"""


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
    on_cpu: Intervals
    """when operators on the CPU computed, outside of gloo's threads"""
    on_device: bool
    """whether kernels compute; CPU operators then only launch them"""
    clues: Clues = field(default_factory=Clues)
    host_steps: dict[int, Intervals] | None = None
    """the steps on the CPU, if a device runs them later"""

    def near(self, window: Intervals) -> "Trace":
        """Return the trace with only the work that overlaps `window`."""
        first, last = window[0, 0], window[-1, 1]

        def reach(times: Intervals) -> NDArray[np.bool_]:
            overlaps: NDArray[np.bool_] = (times[:, 0] < last) & (times[:, 1] > first)
            return overlaps

        return replace(
            self,
            on_cpu=self.on_cpu[reach(self.on_cpu)],
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
        times = merge(self.kernels.times) if self.on_device else self.on_cpu
        return intersection(times, window)

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

    def of(self, events: Device) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return time and thread of the launch of each event; -1 where the thread is unknown.

        A stream runs in the order of launches. So what ran on it without a known launch, before
        anything with one, was launched before the trace began.
        """
        known = np.array(self._correlation)
        order = np.argsort(known)
        wanted, start = np.array(events.correlation), np.array(events.start)
        if len(known) == 0 or len(wanted) == 0:
            return start, np.full(len(wanted), -1)
        index = np.searchsorted(known[order], wanted).clip(max=len(known) - 1)
        launch = order[index]
        is_known = known[launch] == wanted
        stream = np.array(events.stream)
        first = np.full(stream.max() + 1, np.inf)
        np.minimum.at(first, stream[is_known], start[is_known])
        before = np.isfinite(first[stream]) & (start < first[stream])
        return (
            np.where(is_known, np.array(self._start)[launch], np.where(before, -np.inf, start)),
            np.where(is_known, np.array(self._thread)[launch], -1),
        )


class ClueReader:
    """Growing clues of one rank."""

    def __init__(self) -> None:
        self._times: dict[str, array[float]] = defaultdict(lambda: array("d"))
        """start, end, start, end, ... by clue, and by annotation for optimizers"""
        self._host: int | None = None
        self.engine_threads: set[int] = set()

    def add(self, clue: str, name: str, start: float, end: float) -> None:
        """Read an event that tells something."""
        self._times[name if clue == OPTIMIZER else clue].extend((start, end))

    def run_by(self, thread: int) -> None:
        """Read which thread annotates steps."""
        if self._host is None:
            self._host = thread

    def finish(self, compute: Mapping[int, Intervals], workers: set[int], counted: Clues) -> Clues:
        """Return the clues.

        Args:
            compute: when operators computed, by thread.
            workers: threads that run collectives.
            counted: clues with the numbers of events.
        """
        times = {key: merge(np.array(pairs).reshape(-1, 2)) for key, pairs in self._times.items()}
        engine = [compute[tid] for tid in sorted(self.engine_threads & compute.keys())]
        aside = workers | self.engine_threads
        others = [intervals for tid, intervals in compute.items() if tid not in aside]
        busiest = max(others, key=len, default=EMPTY)
        return replace(
            counted,
            engine=times.pop(ENGINE, merge(np.concatenate([EMPTY, *engine]))),
            aside=times.pop(ASIDE, EMPTY),
            optimizer=times,
            host=busiest if self._host is None else compute[self._host],
        )
