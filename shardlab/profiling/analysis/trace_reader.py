"""Reader of traces of any size, as a stream.

Of operators on the CPU only the time is kept in which they compute; collectives, labels and what
devices did are kept one by one.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from shardlab.core.errors import UserError
from shardlab.profiling.analysis.attribution import (
    GLOO_OPERATIONS,
    Call,
    Label,
    units_of_calls,
    units_of_worker,
)
from shardlab.profiling.analysis.intervals import Intervals, merge
from shardlab.profiling.analysis.operators import Operators, OutOfOrder
from shardlab.profiling.analysis.trace import Collectives, Device, Launched, Launches, Trace
from shardlab.profiling.traces.labels import BACKWARD, FORWARD, LINK, unit_of
from shardlab.profiling.traces.trace_file import Event, read_events, read_header, refusing

_OPERATOR, _RANGE, _KERNEL, _COPY, _LAUNCH = range(5)
_KINDS = {
    "cpu_op": _OPERATOR,
    "user_annotation": _RANGE,
    "kernel": _KERNEL,
    "gpu_memcpy": _COPY,
    "gpu_memset": _COPY,
    "cuda_runtime": _LAUNCH,
    "cuda_driver": _LAUNCH,
}
_OTHER, _COMPUTE, _CALL, _STEP, _LABEL, _COLLECTIVE = range(6)
"""class of an operator or range"""

_STEP_NAME = re.compile(r"ProfilerStep#(\d+)")
_LONGEST_US = 1e12
"""between two events of a trace: eleven days"""
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
_WORKER = "pt_gloo_runloop"
"""name of the threads that run gloo's collectives"""
# operators that launch or await collectives, or run hooks that do
_NOT_COMPUTE = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")


def read_trace(path: str | Path) -> dict[int, Trace]:
    """Read every rank of a merged trace, or the rank that wrote a trace by itself.

    Raises:
        UserError: an incomplete trace, or one without events.
    """
    with refusing(path):
        try:
            return _read(path, patient=False)
        except OutOfOrder:
            # only Kineto and `write_trace` guarantee the order
            return _read(path, patient=True)


def _read(path: str | Path, patient: bool) -> dict[int, Trace]:
    header = read_header(path)
    of_process = {int(pid): rank for pid, rank in (header.get("ranks") or {}).items()}
    alone = header.get("distributedInfo", {}).get("rank", 0)
    ranks = {rank: _Rank(patient) for rank in sorted(set(of_process.values()) or {alone})}
    readers = {pid: ranks[rank].add for pid, rank in of_process.items()}
    origin: float | None = None
    for event in read_events(path):
        if origin is None and event["ph"] == "X":
            # large floating-point numbers have no digits left for nanoseconds
            origin = event["ts"]
        add = readers.get(event.get("pid", -1)) if of_process else ranks[alone].add
        if add is not None:
            add(event, origin or 0.0)
    for rank, found in ranks.items():
        if found.empty:
            raise UserError(f"{path}: no timed events of rank {rank}: trace the run again")
    return {rank: found.finish() for rank, found in ranks.items()}


class _Rank:
    """One rank while its events are read."""

    def __init__(self, patient: bool) -> None:
        self.empty = True
        self._threads: dict[int, Operators] = defaultdict(lambda: Operators(patient))
        self._workers: set[int] = set()
        self._steps: dict[int, list[tuple[float, float]]] = defaultdict(list)
        self._passes: dict[str, list[tuple[float, float]]] = {FORWARD: [], BACKWARD: []}
        self._labels: dict[int, list[Label]] = defaultdict(list)
        self._calls: list[Call] = []
        self._collectives: list[tuple[float, float, int, str]] = []
        """start, end, thread, operation"""
        self._kernels = Device()
        self._copies = Device()
        self._nccl = Device()
        self._nccl_operations: list[str] = []
        self._launches = Launches()

    def add(self, event: Event, origin: float) -> None:
        """Read one event."""
        kind = _KINDS.get(event.get("cat", ""))
        if kind is None or event["ph"] != "X":
            if event["ph"] == "M" and event["name"] == "thread_name":
                self._name_thread(event)
            return
        self.empty = False
        start = event["ts"] - origin
        end = start + event["dur"]
        if not -_LONGEST_US < start <= end < _LONGEST_US:
            raise ValueError(f"an event at {event['ts']} that lasts {event['dur']} us")
        if kind > _RANGE:
            self._add_device(kind, event, start, end)
            return
        role = _role(kind, event["name"])
        self._threads[event["tid"]].add(start, end, role == _COMPUTE)
        if role > _COMPUTE:
            self._note(role, event, start, end)

    def _name_thread(self, event: Event) -> None:
        if _WORKER in event["args"]["name"]:
            self._workers.add(event["tid"])

    def _note(self, role: int, event: Event, start: float, end: float) -> None:
        name, thread = event["name"], event["tid"]
        if role == _CALL:
            self._calls.append(Call(start, thread, name))
        elif role == _STEP:
            match = _STEP_NAME.fullmatch(name)
            assert match is not None
            self._steps[int(match[1])].append((start, end))
        elif role == _COLLECTIVE:
            self._collectives.append((start, end, thread, name))
        elif name in self._passes:
            self._passes[name].append((start, end))
        else:
            self._labels[thread].append(Label(start, end, unit_of(name) or ""))

    def _add_device(self, kind: int, event: Event, start: float, end: float) -> None:
        if kind == _LAUNCH:
            self._launches.add(event, start)
        elif kind == _COPY:
            self._copies.add(event, start, end)
        elif operation := _nccl_operation(event):
            self._nccl.add(event, start, end)
            self._nccl_operations.append(operation)
        else:
            self._kernels.add(event, start, end)

    def finish(self) -> Trace:
        """Return the complete trace."""
        for operators in self._threads.values():
            operators.finish()
        return Trace(
            steps={number: merge(_intervals(t)) for number, t in sorted(self._steps.items())},
            forward=merge(_intervals(self._passes[FORWARD])),
            backward=merge(_intervals(self._passes[BACKWARD])),
            kernels=self._launched(self._kernels),
            copies=self._launched(self._copies),
            collectives=self._all_collectives(),
            on_device=len(self._kernels.start) > 0,
            operators=[t for tid, t in self._threads.items() if tid not in self._workers],
        )

    def _launched(self, found: Device) -> Launched:
        launched, _ = self._launches.of(found)
        return Launched(found.times, launched)

    def _all_collectives(self) -> Collectives:
        mine = [each for each in self._collectives if each[2] not in self._workers]
        workers = sorted(each for each in self._collectives if each[2] in self._workers)
        launched, threads = self._launches.of(self._nccl)
        units = [
            *units_of_calls(self._labels, [(start, tid) for start, _, tid, _ in mine]),
            *units_of_worker(self._labels, self._calls, [name for *_, name in workers]),
            *units_of_calls(self._labels, list(zip(launched, threads, strict=True))),
        ]
        on_cpu = _intervals([(start, end) for start, end, *_ in (*mine, *workers)])
        operations = [name for *_, name in (*mine, *workers)] + self._nccl_operations
        times = np.concatenate([on_cpu, self._nccl.times])
        order = np.argsort(times[:, 0], kind="stable")
        return Collectives(
            times[order],
            np.concatenate([on_cpu[:, 0], launched])[order],
            np.array(operations, dtype=np.str_)[order],
            np.array(units, dtype=np.str_)[order],
        )


@cache
def _role(kind: int, name: str) -> int:
    if kind == _OPERATOR:
        if name in GLOO_OPERATIONS:
            return _CALL
        # nodes of the autograd engine have no namespace (MulBackward0)
        return _COMPUTE if "::" in name and not name.startswith(_NOT_COMPUTE) else _OTHER
    if name.startswith("gloo:") or name == LINK:
        return _COLLECTIVE
    if _STEP_NAME.fullmatch(name):
        return _STEP
    return _LABEL if name in (FORWARD, BACKWARD) or unit_of(name) is not None else _OTHER


def _nccl_operation(event: Event) -> str:
    """Return the collective that a kernel runs; empty if it is none."""
    match = _NCCL.match(event["name"])
    if match is None:
        return ""
    # one NCCL kernel serves all operations; torch records which one it launched
    recorded = event.get("args", {}).get("Collective name", "") if match[1] == "Generic" else ""
    return f"nccl:{recorded or match[1]}"


def _intervals(pairs: Sequence[tuple[float, float]]) -> Intervals:
    return np.array(pairs, dtype=float).reshape(-1, 2)
