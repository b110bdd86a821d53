"""Trace of one rank: its steps and passes, and the times of compute, communication and copies.

Labels are around the call that starts a collective, on the thread that makes the call. NCCL's
kernels are traced back to that call by the correlation of their launch. Point-to-point messages
happen inside of the call. A collective of gloo's worker threads has no link to its call: the i-th
call of an operation is matched to the i-th that runs. Where two workers begin two collectives in
another order than they were called, the two get each other's unit.
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
"""Correlations that mean that the profiler knows no launch."""
EVER = np.array([[-np.inf, np.inf]])


@dataclass(frozen=True)
class Clues:
    """Events of one rank from which steps and passes are inferred; times are on the CPU."""

    span: Intervals = field(default_factory=lambda: EMPTY)
    """Time from the first event to the last."""
    engine: Intervals = field(default_factory=lambda: EMPTY)
    """Nodes of the autograd engine."""
    optimizer: Mapping[str, Intervals] = field(default_factory=dict)
    """Calls of `Optimizer.step`, by annotation."""
    aside: Intervals = field(default_factory=lambda: EMPTY)
    """Work of neither pass: `zero_grad`, loading of batches."""
    host: Intervals = field(default_factory=lambda: EMPTY)
    """Compute of operators on the thread that runs the steps."""
    calls: int = 0
    """Number of calls of collectives by c10d's operators."""
    launches: int = 0
    """Number of launches of work on devices."""
    unlaunched: int = 0
    """Number of kernels and copies without a launch in the trace."""
    earlier: int = 0
    """Number of kernels and copies that were launched before the trace began."""
    outlasting: int = 0
    """Number of kernels and copies that end, by the trace, after the next one of their stream
    began."""


@dataclass(frozen=True)
class Trace:
    """Trace of one rank; times are microseconds from the same origin on all ranks of a trace.

    The launch time of work is the time at which the CPU launched it; for gloo's workers, the time
    of the call. Where the trace has no launch, it is -inf for work that was launched before the
    trace began, and otherwise the start of the work.
    """

    steps: dict[int, Intervals]
    forward: Intervals
    """Forward passes of all steps, on the CPU."""
    backward: Intervals
    """Backward passes of all steps, on the CPU."""
    kernels: EventTable
    """Kernels except NCCL's."""
    copies: EventTable
    """Copies to, from and on devices, fills included."""
    collectives: EventTable
    """Communication between ranks, in the order of its start."""
    on_cpu: Intervals
    """Compute of operators on the CPU, outside of gloo's threads."""
    on_device: bool
    """Whether kernels compute; CPU operators then only launch them."""
    clues: Clues = field(default_factory=Clues)
    host_steps: dict[int, Intervals] | None = None
    """Steps on the CPU, where a device runs them later."""

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
        """Return the time of compute within `window`."""
        times = merge(times_of(self.kernels)) if self.on_device else self.on_cpu
        return intersection(times, window)

    def communication(self, window: Intervals) -> Intervals:
        """Return the time of communication within `window`."""
        return intersection(merge(times_of(self.collectives)), window)


def launched_during(work: EventTable, window: Intervals) -> Intervals:
    """Return the time of work that was launched within `window`."""
    return merge(times_of(work[covers(window, work["launched"])]))


def traces_of(events: Events, shift_us: float = 0.0) -> dict[int, Trace]:
    """Return the trace of each rank.

    Args:
        shift_us: shift that is added to all times.
    """
    # of events with equal starts, the longest, which holds the others, comes first
    table = events.table[np.lexsort((-events.table["end"], events.table["start"]))]
    for column in ("start", "end", "launched"):
        table[column] += shift_us

    def threads(rank: int, kind: str) -> list[str]:
        return [tid for (owner, tid), k in events.threads.items() if (owner, k) == (rank, kind)]

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
            span=np.array([[events["start"].min(), events["end"].max()]]),
            calls=len(roles["call"]),
            launches=len(roles["launch"]),
            unlaunched=sum(caller is None for caller in work["caller"]),
            earlier=int(np.isneginf(work["launched"]).sum()),
            outlasting=outlasting,
        ),
    )


def computing(times: Intervals, computes: NDArray[np.bool_]) -> Intervals:
    """Return the time in which operators of a thread compute.

    An operator computes unless it holds an operator that launches or awaits a collective, a node of
    the autograd engine or a labelled range: such a wrapper lasts as long as it waits.

    Args:
        times: start and end of operators and labelled ranges, by start.
        computes: whether each event is an operator that may compute.
    """
    operators, excluded = times[computes], times[~computes]
    # earliest end among the excluded events that start at this one or later
    first_end = np.append(np.minimum.accumulate(excluded[::-1, 1])[::-1], np.inf)
    later = np.searchsorted(excluded[:, 0], operators[:, 0] - RESOLUTION_US)
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

    A stream runs in the order of launches. So work without a launch in the trace that ran on its
    stream before all work with one was launched before the trace began. Other work without a launch
    counts as launched with the work that the device began last before it.
    """
    # of several launches with one correlation the first counts
    row_of = dict(zip(launches["correlation"][::-1], range(len(launches))[::-1], strict=True))
    for number in _NO_LAUNCH:
        row_of.pop(number, None)
    rows = np.array([row_of.get(number, -1) for number in work["correlation"]], dtype=int)
    has_launch = rows >= 0
    # first start by stream: work is in the order of its start, and the last entry of a key stays
    first = dict(
        zip(work["thread"][has_launch][::-1], work["start"][has_launch][::-1], strict=True)
    )
    earlier = [
        start < first.get(stream, start)
        for stream, start in zip(work["thread"], work["start"], strict=True)
    ]
    previous = np.searchsorted(work["start"][has_launch], work["start"], side="right") - 1
    inferred = (previous >= 0) & ~has_launch
    launched = launches["start"][rows[has_launch]]
    work["launched"][inferred] = launched[previous[inferred]]
    work["launched"][earlier] = -np.inf
    work["launched"][has_launch] = launched
    work["caller"] = None
    work["caller"][has_launch] = launches["thread"][rows[has_launch]]
    return work


def _called(sent: EventTable, calls: EventTable, workers: list[str]) -> EventTable:
    """Set time and thread of the call of collectives on the CPU.

    Where an operation has another number of collectives than of calls, they cannot be matched, and
    each keeps its own time and thread.
    """
    by_worker = np.isin(sent["thread"], workers)
    operations = [GLOO_OPERATIONS[name] for name in calls["name"]]
    for operation, called in groups(calls, operations).items():
        run = by_worker & (sent["name"] == operation)
        if run.sum() == len(called):
            sent["launched"][run] = called["start"]
            sent["caller"][run] = called["thread"]
    return sent


def _named(sent: EventTable, ranges: EventTable) -> EventTable:
    """Name collectives without a name in their record after the range around their launch: the
    kernel may have the name of another operation (SendRecv in an all-to-all)."""
    unsure = np.flatnonzero(~sent["reported"])
    for row, around in zip(unsure, _innermost(ranges, sent[unsure]), strict=True):
        operation = operation_of(around)
        if operation is not None:
            sent["name"][row] = f"{sent['name'][row].partition(':')[0]}:{operation}"
    return sent


def _innermost(ranges: EventTable, called: EventTable) -> list[str]:
    """Return the name of the innermost range around the call of each event; empty without one."""
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
    hosts = [times for tid, times in compute.items() if tid not in (*workers, *engine_threads)]
    # steps run on the thread that annotates them; where ranges have other thread numbers than
    # operators, on the busiest thread
    host = max(hosts, key=len, default=EMPTY)
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
