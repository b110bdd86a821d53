"""Reader of traces: events to one `Trace` per rank."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardlab.core.errors import UserError
from shardlab.profiling.intervals import EMPTY, Intervals, merge
from shardlab.profiling.labels import BACKWARD, FORWARD, unit_of
from shardlab.profiling.operators import Operators
from shardlab.profiling.roles import (
    CALL,
    CLUE,
    COLLECTIVE,
    COMPUTE,
    COPY,
    COPY_KERNEL,
    KINDS,
    LAUNCH,
    RANGE,
    STEP,
    STEP_NAME,
    Call,
    Label,
    calls_of_worker,
    collective_of,
    kind_of_copy,
    role_of,
    units_of_calls,
)
from shardlab.profiling.trace import (
    ENGINE_THREAD,
    OPTIMIZER,
    ClueReader,
    Clues,
    Collectives,
    Device,
    Launched,
    Launches,
    Trace,
    clue_of,
)
from shardlab.profiling.trace_file import Event, load_trace, refusing

_LONGEST_US = 1e12
"""between two events of a trace: eleven days"""
_WORKER = "pt_gloo_runloop"
"""name of the threads that run gloo's collectives"""


def read_trace(path: str | Path, origin: float | None = None) -> dict[int, Trace]:
    """Read every rank of a merged trace, or the rank that wrote a trace by itself.

    Args:
        origin: the time of the trace from which times count; that of its first event if not given.

    Raises:
        UserError: an incomplete trace, or one without events.
    """
    with refusing(path):
        return _read(path, origin)


def _read(path: str | Path, origin: float | None) -> dict[int, Trace]:
    header, events = load_trace(path)
    of_process = {int(pid): rank for pid, rank in (header.get("ranks") or {}).items()}
    alone = int(header.get("distributedInfo", {}).get("rank", 0))
    ranks = {rank: _Rank() for rank in sorted(set(of_process.values()) or {alone})}
    readers = {pid: ranks[rank].add for pid, rank in of_process.items()}
    for event in events:
        if origin is None and event["ph"] == "X":
            # large floating-point numbers have no digits left for nanoseconds
            origin = event["ts"]
        add = readers.get(event.get("pid", -1)) if of_process else ranks[alone].add
        if add is not None:
            add(event, origin or 0.0)
    for rank, reader in ranks.items():
        if reader.empty:
            raise UserError(f"{path}: no timed events of rank {rank}: trace the run again")
    return {rank: reader.finish() for rank, reader in ranks.items()}


class _Rank:
    """One rank while its events are read."""

    def __init__(self) -> None:
        self._first, self._last = float("inf"), -float("inf")
        self._threads: dict[int, Operators] = defaultdict(Operators)
        self._workers: set[int] = set()
        self._steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._passes: dict[str, list[tuple[float, float]]] = {FORWARD: [], BACKWARD: []}
        self._labels: dict[int, list[Label]] = defaultdict(list)
        self._calls: list[Call] = []
        self._collectives: list[tuple[float, float, int, str]] = []
        """start, end, thread, operation"""
        self._kernels = Device()
        self._copies = Device()
        self._copy_kinds: list[str] = []
        self._nccl = Device()
        self._nccl_operations: list[str] = []
        self._launches = Launches()
        self._clues = ClueReader()

    @property
    def empty(self) -> bool:
        """Return whether no timed event was read."""
        return self._first > self._last

    def add(self, event: Event, origin: float) -> None:
        """Read one event."""
        kind = KINDS.get(event.get("cat", ""))
        if kind is None or event["ph"] != "X":
            if event["ph"] == "M" and event["name"] == "thread_name":
                self._name_thread(event)
            return
        start = event["ts"] - origin
        end = start + event["dur"]
        if not -_LONGEST_US < start <= end < _LONGEST_US:
            raise ValueError(f"an event at {event['ts']} that lasts {event['dur']} us")
        if start < self._first:
            self._first = start
        if end > self._last:
            self._last = end
        if kind > RANGE:
            self._add_device(kind, event, start, end)
            return
        role = role_of(kind, event["name"])
        self._threads[event["tid"]].add(start, end, role == COMPUTE)
        if role > COMPUTE:
            self._note(role, event, start, end)

    def _name_thread(self, event: Event) -> None:
        if _WORKER in event["args"]["name"]:
            self._workers.add(event["tid"])
        elif ENGINE_THREAD in event["args"]["name"]:
            self._clues.engine_threads.add(event["tid"])

    def _note(self, role: int, event: Event, start: float, end: float) -> None:
        name, thread = event["name"], event["tid"]
        if role == CALL:
            self._calls.append(Call(start, thread, name))
        elif role == STEP:
            match = STEP_NAME.fullmatch(name)
            assert match is not None
            self._steps[int(match[1])].append((start, end))
            self._clues.run_by(thread)
        elif role == COLLECTIVE:
            self._collectives.append((start, end, thread, name))
        elif role == CLUE:
            self._clues.add(clue_of(name), name, start, end)
            if clue_of(name) == OPTIMIZER:
                self._clues.run_by(thread)
        elif name in self._passes:
            self._passes[name].append((start, end))
        else:
            self._labels[thread].append(Label(start, end, unit_of(name) or ""))

    def _add_device(self, kind: int, event: Event, start: float, end: float) -> None:
        if kind == LAUNCH:
            self._launches.add(event, start)
        elif kind == COPY or COPY_KERNEL.match(event["name"]):
            self._copies.add(event, start, end)
            self._copy_kinds.append(kind_of_copy(event["name"]))
        elif operation := collective_of(event):
            self._nccl.add(event, start, end)
            self._nccl_operations.append(operation)
        else:
            self._kernels.add(event, start, end)

    def finish(self) -> Trace:
        """Return the complete trace."""
        compute = {tid: operators.compute() for tid, operators in self._threads.items()}
        on_cpu = [times for tid, times in compute.items() if tid not in self._workers]
        return Trace(
            steps={number: merge(_intervals(t)) for number, t in sorted(self._steps.items())},
            forward=merge(_intervals(self._passes[FORWARD])),
            backward=merge(_intervals(self._passes[BACKWARD])),
            kernels=self._launched(self._kernels),
            copies=self._launched(self._copies)._replace(
                kinds=np.array(self._copy_kinds, dtype=np.str_)
            ),
            collectives=self._all_collectives(),
            on_device=len(self._kernels.start) > 0,
            on_cpu=merge(np.concatenate([EMPTY, *on_cpu])),
            clues=self._clues.finish(compute, self._workers, self._counted()),
        )

    def _counted(self) -> Clues:
        work = [self._launches.of(events) for events in (self._kernels, self._copies, self._nccl)]
        return Clues(
            whole=np.array([[self._first, self._last]]),
            calls=len(self._calls),
            launches=len(self._launches),
            unlaunched=sum(int((threads < 0).sum()) for _, threads in work),
            earlier=sum(int(np.isneginf(times).sum()) for times, _ in work),
        )

    def _launched(self, events: Device) -> Launched:
        launched, _ = self._launches.of(events)
        return Launched(events.times, launched)

    def _all_collectives(self) -> Collectives:
        mine = [c for c in self._collectives if c[2] not in self._workers]
        workers = sorted(c for c in self._collectives if c[2] in self._workers)
        called = calls_of_worker(self._calls, [name for *_, name in workers])
        on_cpu_called = [
            *((start, tid) for start, _, tid, _ in mine),
            *(
                (start, tid) if call is None else (call.start, call.thread)
                for (start, _, tid, _), call in zip(workers, called, strict=True)
            ),
        ]
        launched, threads = self._launches.of(self._nccl)
        calls = [*on_cpu_called, *zip(launched.tolist(), threads.tolist(), strict=True)]
        on_cpu = _intervals([(start, end) for start, end, *_ in (*mine, *workers)])
        operations = [name for *_, name in (*mine, *workers)] + self._nccl_operations
        times = np.concatenate([on_cpu, self._nccl.times])
        order = np.argsort(times[:, 0], kind="stable")
        return Collectives(
            times[order],
            np.array([time for time, _ in calls])[order],
            np.array(operations, dtype=np.str_)[order],
            np.array(units_of_calls(self._labels, calls), dtype=np.str_)[order],
        )


def _intervals(pairs: Sequence[tuple[float, float]]) -> Intervals:
    return np.array(pairs, dtype=float).reshape(-1, 2)
