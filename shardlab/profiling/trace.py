"""One rank's trace: its steps and passes, and what computed, moved and copied when.

Labels stand around the call that starts a collective, on the thread that makes it. NCCL's kernels
are traced back to that call by the correlation of their launch, messages to one other rank happen
inside of it. What gloo's worker threads run is not linked to its call: the i-th call of an
operation is matched to the i-th that runs. Two workers may begin two collectives in the other order
than they were called, then these two exchange their units.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardlab.profiling.events import (
    GLOO_OPERATIONS,
    ON_DEVICES,
    STEP,
    WORK,
    Events,
    EventTable,
    groups,
    operation_of,
)
from shardlab.profiling.intervals import (
    EMPTY,
    RESOLUTION_US,
    Intervals,
    covers,
    intersection,
    merge,
    times_of,
)
from shardlab.profiling.labels import BACKWARD, FORWARD, unit_of

_NO_LAUNCH = (None, 0)
"""numbers of a launch by which a profiler says that it knows none"""
EVER = np.array([[-np.inf, np.inf]])


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
    outlasting: int = 0
    """kernels and copies that the trace lets last beyond the next one of their stream"""


@dataclass(frozen=True)
class Trace:
    """Trace of one rank; times are microseconds from the same origin on all ranks of a trace.

    Work is launched when the CPU launched it, that of gloo's workers when it was called; where the
    trace does not say, at -inf if it was before the trace, otherwise at its own start.
    """

    steps: dict[int, Intervals]
    forward: Intervals
    """of all steps, on the CPU"""
    backward: Intervals
    kernels: EventTable
    """kernels except NCCL's"""
    copies: EventTable
    """copies to, from and on devices, fills included"""
    collectives: EventTable
    """communication between ranks, in the order of its start"""
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
        work = [events[(events["start"] < last) & (events["end"] > first)] for events in self.work]
        reached = (self.on_cpu[:, 0] < last) & (self.on_cpu[:, 1] > first)
        kernels, copies, collectives = work
        return replace(
            self,
            on_cpu=self.on_cpu[reached],
            kernels=kernels,
            copies=copies,
            collectives=collectives,
        )

    @property
    def work(self) -> tuple[EventTable, EventTable, EventTable]:
        """All events on devices, and all collectives."""
        return self.kernels, self.copies, self.collectives

    def compute(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which anything computed."""
        times = merge(times_of(self.kernels)) if self.on_device else self.on_cpu
        return intersection(times, window)

    def communication(self, window: Intervals) -> Intervals:
        """Return the time within `window` in which a collective ran."""
        return intersection(merge(times_of(self.collectives)), window)


def launched_during(work: EventTable, window: Intervals) -> Intervals:
    """Return the time of work that was launched within `window`."""
    return merge(times_of(work[covers(window, work["launched"])]))


def traces_of(events: Events, shift_us: float = 0.0) -> dict[int, Trace]:
    """Return the trace of each rank.

    Args:
        shift_us: is added to all times.
    """
    # of events that start together, the one that holds the others is first
    table = events.table[np.lexsort((-events.table["end"], events.table["start"]))]
    for column in ("start", "end", "launched"):
        table[column] += shift_us

    def threads(rank: int, kind: str) -> list[str]:
        return [tid for (of, tid), this in events.threads.items() if (of, this) == (rank, kind)]

    return {
        rank: _trace(of_rank, threads(rank, "worker"), threads(rank, "engine"))
        for rank, of_rank in groups(table, table["rank"].tolist()).items()
    }


def _trace(events: EventTable, workers: list[str], engine_threads: list[str]) -> Trace:
    none = events[:0]
    roles = defaultdict(lambda: none, groups(events, events["role"]))
    on_cpu = events[~np.isin(events["role"], ON_DEVICES)]
    compute = {
        thread: computing(times_of(of_thread), of_thread["role"] == "compute")
        for thread, of_thread in groups(on_cpu, on_cpu["thread"]).items()
    }
    work, outlasting = _in_order(events[np.isin(events["role"], WORK)])
    work = _launched(work, roles["launch"])
    sent = _called(roles["collective"], roles["call"], workers)
    on_device = _named(work[work["role"] == "nccl"], roles["named"])
    sent = np.concatenate([sent, on_device])
    sent = sent[np.argsort(sent["start"], kind="stable")]
    sent["unit"] = [unit_of(label) or "" for label in _innermost(roles["label"], sent)]
    passes, steps = roles["pass"], roles["step"]
    numbers = [int(name.removeprefix(STEP)) for name in steps["name"]]
    kernels = work[work["role"] == "kernel"]
    return Trace(
        steps={number: merge(times_of(step)) for number, step in groups(steps, numbers).items()},
        forward=merge(times_of(passes[passes["name"] == FORWARD])),
        backward=merge(times_of(passes[passes["name"] == BACKWARD])),
        kernels=kernels,
        copies=work[work["role"] == "copy"],
        collectives=sent,
        on_device=len(kernels) > 0,
        on_cpu=merge(np.concatenate([EMPTY, *(t for i, t in compute.items() if i not in workers)])),
        clues=replace(
            _clues(roles, compute, workers, engine_threads),
            whole=np.array([[events["start"].min(), events["end"].max()]]),
            calls=len(roles["call"]),
            launches=len(roles["launch"]),
            unlaunched=sum(caller is None for caller in work["caller"]),
            earlier=int(np.isneginf(work["launched"]).sum()),
            outlasting=outlasting,
        ),
    )


def computing(times: Intervals, computes: NDArray[np.bool_]) -> Intervals:
    """Return the time in which operators of a thread compute.

    An operator computes unless it holds one that launches or awaits a collective, a node of the
    autograd engine or a labelled range: such a wrapper lasts as long as what it waits for.

    Args:
        times: start and end of operators and labelled ranges, by start.
        computes: whether each of them is an operator that may compute.
    """
    operators, others = times[computes], times[~computes]
    # the first end among all that start at this one or later
    first_end = np.append(np.minimum.accumulate(others[::-1, 1])[::-1], np.inf)
    later = np.searchsorted(others[:, 0], operators[:, 0] - RESOLUTION_US)
    return merge(operators[first_end[later] > operators[:, 1] + RESOLUTION_US])


def _in_order(work: EventTable) -> tuple[EventTable, int]:
    """End what lasts beyond the next work of its stream where that begins, as a stream runs one
    after the other; return also how many there are.

    What a replayed graph runs shares a launch, and is concurrent.
    """
    times = Counter(work["correlation"])
    alone = [number in _NO_LAUNCH or times[number] == 1 for number in work["correlation"]]
    start, end, ended = work["start"], work["end"], 0
    streams: dict[str, list[int]] = defaultdict(list)
    for row, stream in enumerate(work["thread"]):
        streams[stream].append(row)
    for of_stream in streams.values():
        for row, after in pairwise(of_stream):
            begun = start[row] < start[after] < end[after]
            if alone[row] and begun and end[row] > end[after] + RESOLUTION_US:
                end[row] = start[after]
                ended += 1
    return work, ended


def _launched(work: EventTable, launches: EventTable) -> EventTable:
    """Set time and thread of the launch of work on devices.

    A stream runs in the order of launches. So what ran on it without a known launch, before
    anything with one, was launched before the trace began. Anything else without one counts as
    launched with what the device began last before it.
    """
    # of launches with one number the first counts
    row_of = dict(zip(launches["correlation"][::-1], range(len(launches))[::-1], strict=True))
    for number in _NO_LAUNCH:
        row_of.pop(number, None)
    rows = np.array([row_of.get(number, -1) for number in work["correlation"]], dtype=int)
    known = rows >= 0
    # by stream, as work is in the order of its start
    first = dict(zip(work["thread"][known][::-1], work["start"][known][::-1], strict=True))
    earlier = [
        start < first.get(stream, start)
        for stream, start in zip(work["thread"], work["start"], strict=True)
    ]
    before = np.searchsorted(work["start"][known], work["start"], side="right") - 1
    beside = (before >= 0) & ~known
    launched = launches["start"][rows[known]]
    work["launched"][beside] = launched[before[beside]]
    work["launched"][earlier] = -np.inf
    work["launched"][known] = launched
    work["caller"] = None
    work["caller"][known] = launches["thread"][rows[known]]
    return work


def _called(sent: EventTable, calls: EventTable, workers: list[str]) -> EventTable:
    """Set time and thread of the call of collectives on the CPU: where they are not as many as the
    calls of their operation, they cannot be matched and have their own."""
    by_worker = np.isin(sent["thread"], workers)
    operations = [GLOO_OPERATIONS[name] for name in calls["name"]]
    for operation, called in groups(calls, operations).items():
        run = by_worker & (sent["name"] == operation)
        if run.sum() == len(called):
            sent["launched"][run] = called["start"]
            sent["caller"][run] = called["thread"]
    return sent


def _named(sent: EventTable, ranges: EventTable) -> EventTable:
    """Name collectives whose record does not say which they are by the range around their launch:
    the kernel's own name may be that of another operation (SendRecv of an all-to-all)."""
    unsure = np.flatnonzero(~sent["reported"])
    for row, around in zip(unsure, _innermost(ranges, sent[unsure]), strict=True):
        operation = operation_of(around)
        if operation is not None:
            sent["name"][row] = f"{sent['name'][row].partition(':')[0]}:{operation}"
    return sent


def _innermost(ranges: EventTable, called: EventTable) -> list[str]:
    """Return the name of the innermost range around the call of each event, empty where none is."""
    by_thread = groups(ranges, ranges["thread"])
    names = []
    for thread, time in zip(called["caller"], called["launched"], strict=True):
        outer = by_thread.get(thread, ranges[:0])
        reached = outer["start"] <= time + RESOLUTION_US
        around = np.flatnonzero(reached & (outer["end"] >= time))
        names.append(outer["name"][around[-1]] if len(around) else "")
    return names


def _clues(
    roles: Mapping[str, EventTable],
    compute: Mapping[str, Intervals],
    workers: list[str],
    engine_threads: list[str],
) -> Clues:
    by_engine = [compute[tid] for tid in engine_threads if tid in compute]
    others = [times for tid, times in compute.items() if tid not in (*workers, *engine_threads)]
    # steps are run by the thread that annotates them, otherwise, as where ranges bear other numbers
    # than operators, by the busiest
    host = max(others, key=len, default=EMPTY)
    for role in ("optimizer", "step"):
        for thread in roles[role]["thread"][:1]:
            host = compute[thread] if len(compute[thread]) else host
    nodes, calls = roles["engine"], roles["optimizer"]
    return Clues(
        engine=merge(times_of(nodes) if len(nodes) else np.concatenate([EMPTY, *by_engine])),
        aside=merge(times_of(roles["aside"])),
        optimizer={name: merge(times_of(of)) for name, of in groups(calls, calls["name"]).items()},
        host=host,
    )
