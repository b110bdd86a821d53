"""Events of a trace as a structured array with start, end and role, by category and name.

| role | event |
|---|---|
| compute | operator on the CPU |
| call | operator that starts a collective of gloo |
| collective | on the CPU: operation of gloo, delay of an emulated link |
| step, pass, label | range that names a step, a pass or the unit whose values move |
| engine, optimizer, aside | node of the autograd engine, `Optimizer.step`, neither pass |
| kernel, copy, nccl | work on a device; nccl: collective of any library |
| launch | call on the CPU that launched such work |
| named | range around the launch of a collective, with its name |
| other | operator that launches or awaits collectives, any other range |
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.core.errors import UserError
from shardlab.profiling.intervals import merge, times_of
from shardlab.profiling.labels import BACKWARD, FORWARD, LINK, unit_of
from shardlab.profiling.trace_file import TraceEvent, load_trace, refusing

EventTable = NDArray[np.void]
"""Array of dtype EVENT."""
EVENT = np.dtype(
    [
        ("rank", int),
        ("role", object),
        ("name", object),  # for a copy its direction, for NCCL the collective
        ("thread", object),  # or stream
        ("start", float),  # us
        ("end", float),
        ("correlation", object),  # number that a launch shares with its work
        ("reported", bool),  # whether the record names the collective
        ("launched", float),  # time of the launch
        ("caller", object),  # thread of the launch
        ("unit", object),  # unit with the values that a collective moves
        ("group", object),  # a `Group` of ranks
    ]
)
STEP = "ProfilerStep#"
GLOO_OPERATIONS = {
    "c10d::allreduce_": "gloo:all_reduce",
    "c10d::allreduce_coalesced_": "gloo:all_reduce",
    # gloo implements these by an all-reduce
    "c10d::_reduce_scatter_base_": "gloo:all_reduce",
    "c10d::reduce_scatter_": "gloo:all_reduce",
    "c10d::_allgather_base_": "gloo:all_gather",
    "c10d::allgather_": "gloo:all_gather",
    "c10d::alltoall_base_": "gloo:all_to_all",
    "c10d::broadcast_": "gloo:broadcast",
    "c10d::barrier": "gloo:barrier",
    "c10d::reduce_": "gloo:reduce",
    "c10d::gather_": "gloo:gather",
    "c10d::scatter_": "gloo:scatter",
}
"""Collectives of gloo, by the operator that starts them."""
WORK = ("kernel", "copy", "nccl")
ON_DEVICES = (*WORK, "launch")

_CATEGORIES = {
    "cpu_op": "operator",
    "user_annotation": "range",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    # torch up to 1.12, with capitals
    "operator": "operator",
    "memcpy": "copy",
    "memset": "copy",
    "runtime": "launch",
    # Meta's accelerator
    "mtia_ccp_events": "kernel",
    **{
        f"{device}_{api}": "launch"
        for device in ("cuda", "xpu", "mtia", "privateuse1")
        for api in ("runtime", "driver")
    },
}
"""Kind of event, by category in lower case."""
_NO_TIME_OF_STEPS = (
    "gpu_user_annotation",
    "python_function",
    "overhead",
    "trace",
    "cuda_sync",
    "cuda_profiler_range",
    "async",
)
"""Categories of timed events that repeat or explain other events."""
_CLUES = {
    # every node that the engine runs, hooks included (torch/csrc/autograd/engine.cpp)
    "autograd::engine::evaluate_function": "engine",
    # work of FSDP2 and FSDP1 after the last node
    "FSDP::post_backward": "engine",
    "FullyShardedDataParallel._post_backward": "engine",
    # written by every torch.optim.Optimizer and by DataLoader
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "aside",
    "enumerate(DataLoader)#": "aside",
}
# operators that launch or await collectives, or run hooks that do
_NOT_COMPUTE = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")
_THREADS = {"pt_gloo_runloop": "worker", "pt_autograd": "engine"}
"""Threads that run gloo's collectives, and threads that launch backward passes on devices."""
_LIBRARIES = {
    # RCCL's kernels have the names of NCCL's
    "nccl": r"[nr]ccl|msccl|hccl|hcom_|(?:one)?ccl(?:\b|_)",
    # torch's own, also by NVSHMEM
    "symm_mem": r"(?:one|two)_shot_(?:all_reduce|reduce)|multimem_\w*(?:reduce|gather)|nvshmem",
    "deep_ep": r"deep_ep::(?!layout)",
    # vLLM, SGLang, AITER
    "custom": r"cross_device_reduce",
    "flashinfer": r"(?:flashinfer|tensorrt_llm)::(?:\w+::)*\w*all_?(?:reduce|gather|to_?all)",
}
_LIBRARY = {
    name: re.compile(
        rf"(?:void |typeinfo name for )?(?:(?:\w+|\(anonymous namespace\))::)*?(?:{start})"
    )
    for name, start in _LIBRARIES.items()
}
_OPERATIONS = {
    "allreduce": "all_reduce",
    "crossdevicereduce": "all_reduce",
    "shotreduce": "reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "sendrecv": "send_recv",
    "dispatch": "dispatch",
    "combine": "combine",
    **{name: name for name in ("broadcast", "barrier", "gather", "scatter", "reduce")},
    "send": "send",
    "recv": "recv",
}
"""Collectives by a part of the letters in the name of a record or kernel; the first match counts.
"""
# ROCm up to 7.1 and MTIA record copies as kernels
_COPY_KERNEL = re.compile(r"MEMORY_COPY_|__amd_rocclr_(?:copy|fill)Buffer|dma_")
_COPY_KIND = re.compile(r"Memcpy (\w+)|(Memset|__amd_rocclr_fillBuffer)")
_LONGEST_US = 1e12
"""Maximum time between two events of a trace: eleven days."""


class Group(NamedTuple):
    """Process group of a collective, as far as its record says."""

    name: str = ""
    ranks: tuple[int, ...] = ()
    """Ranks of the group; empty where they are unknown, or too many for the record."""
    size: int = 0
    """Number of ranks; 0: unknown."""


class Events(NamedTuple):
    """Timed events of a trace, and its clock."""

    table: EventTable
    """Events in the order of the file, with times since the first event. As defaults, launch time
    and caller are start and thread of the event, and the unit is empty."""
    threads: dict[tuple[Any, str], str]
    """`worker` or `engine`, by rank and thread."""
    base_ns: int
    first_us: float
    """Time of the first event since the base."""
    world_size: int
    """Number of ranks of the job; 0 where the trace does not say it."""
    numbered: bool
    """Whether the trace says its rank."""
    process: str
    """Process of the rank, by host and number; empty in a merged trace."""
    unread: dict[str, int]
    """Number of timed events without a time or with an unknown category, by category."""


def read_events(path: str | Path) -> Events:
    """Return the events of every rank of a merged trace, or of the rank that wrote the trace.

    Raises:
        UserError: an incomplete trace, or one without events.
    """
    with refusing(path):
        header, raw_events = load_trace(path)
        events = [event for event in raw_events if not _lost_time(event)]
        job = header.get("distributedInfo") or {}
        of_process = {int(pid): rank for pid, rank in (header.get("ranks") or {}).items()}
        job_rank = int(job.get("rank", -1))  # -1: the process group was not initialised
        numbered, single_rank = bool(of_process) or job_rank >= 0, max(job_rank, 0)

        def rank_of(event: TraceEvent) -> Any:
            return of_process.get(event.get("pid", -1)) if of_process else single_rank

        process = "" if of_process else f"{header.get('host_name')} {_process(path, events)}"
        first = next((float(event["ts"]) for event in events if event["ph"] == "X"), 0.0)
        table = np.fromiter(_rows(events, rank_of, first), EVENT)
        _refuse_joined_traces(path, table)
        unread = _unread(raw_events)
        for rank in sorted(set(of_process.values()) or {single_rank}):
            if not (table["rank"] == rank).any():
                skipped = f", {list_unread(unread)}" if unread else ""
                raise UserError(
                    f"{path}: no timed events of rank {rank}{skipped}: trace the run again with "
                    "torch.profiler.profile"
                )
        # a merged trace holds the job information of each rank
        jobs = [job, *(value for value in job.values() if isinstance(value, dict))]
        return Events(
            table=table,
            threads=dict(_threads(events, rank_of)),
            base_ns=int(header.get("baseTimeNanoseconds", 0)),
            first_us=first,
            world_size=max(0, *(int(job.get("world_size", 0)) for job in jobs)),
            numbered=numbered,
            process=process,
            unread=unread,
        )


def groups(events: EventTable, keys: Iterable[Any]) -> dict[Any, EventTable]:
    """Return the events of each key, by key.

    Args:
        keys: key of each event.
    """
    rows = defaultdict(list)
    for row, key in enumerate(keys):
        rows[key].append(row)
    return {key: events[rows[key]] for key in sorted(rows)}


def list_unread(unread: Mapping[str, int]) -> str:
    """Return in words how many timed events were not understood."""
    names = ", ".join(sorted(unread))
    return f"{sum(unread.values())} timed events of unknown categories or times ({names})"


def _unread(events: Iterable[TraceEvent]) -> dict[str, int]:
    unread: Counter[str] = Counter()
    for event in events:
        name = str(event.get("cat", "none"))
        if event["ph"] != "X" or name.lower() in _NO_TIME_OF_STEPS:
            continue
        if name.lower() not in _CATEGORIES:
            unread[name] += 1
        elif _lost_time(event):
            unread[f"{name} at 0"] += 1
    return dict(unread)


def _lost_time(event: TraceEvent) -> bool:
    """Return whether the profiler wrote 0 for both start and duration, as for late events that it
    could not place."""
    return event["ph"] == "X" and float(event["ts"]) == float(event["dur"]) == 0


def _process(path: str | Path, events: Iterable[TraceEvent]) -> str:
    """Return the number of the process that ran the operators.

    In a container, ranges may bear another number of the same process than operators.

    Raises:
        UserError: another tool merged the ranks of a job into the file. The process of work on a
            device is the number of the device, so its rank is unknown.
    """
    kinds = defaultdict(set)
    for event in events:
        if event["ph"] == "X":
            kinds[_CATEGORIES.get(str(event.get("cat")).lower())].add(str(event.get("pid")))
    processes = kinds["operator"] or kinds["range"]
    if len(processes) > 1:
        raise UserError(
            f"{path}: holds {len(processes)} processes ({', '.join(sorted(processes)[:4])}), which "
            "another tool merged: give the trace of each rank"
        )
    return "".join(processes)


def _refuse_joined_traces(path: str | Path, table: EventTable) -> None:
    steps = table[table["role"] == "step"]
    for (_, _, name), step in groups(steps, steps[["rank", "thread", "name"]].tolist()).items():
        if len(merge(times_of(step))) > 1:
            raise UserError(
                f"{path}: {name} occurs twice on one thread, as in two traces joined to one: give "
                "each in a file of its own"
            )


def _rows(
    events: Iterable[TraceEvent], rank_of: Callable[[TraceEvent], Any], first: float
) -> Iterator[tuple[Any, ...]]:
    for event in events:
        category = _CATEGORIES.get(str(event.get("cat", "")).lower())
        if category is None or event["ph"] != "X" or (rank := rank_of(event)) is None:
            continue
        name, args, reported, group = event["name"], {}, None, Group()
        if category in ON_DEVICES:
            args = event.get("args", {})
            reported = args.get("Collective name")
            role, name = _role_on_device(category, name, reported)
            group = _group(args)
        else:
            role = _role_on_cpu(category, name)
        # large floating-point numbers have no digits left for nanoseconds; Ascend writes text
        start, thread = float(event["ts"]) - first, str(event["tid"])
        end = start + float(event["dur"])
        if not -_LONGEST_US < start <= end < _LONGEST_US:
            raise ValueError(f"an event from {start} to {end} us")
        correlation, sure = args.get("correlation"), operation_of(reported) is not None
        yield rank, role, name, thread, start, end, correlation, sure, start, thread, "", group


def _group(args: Mapping[str, Any]) -> Group:
    ranks, size = str(args.get("Process Group Ranks", "")), args.get("Group size")
    listed = () if "..." in ranks else tuple(map(int, re.findall(r"\d+", ranks)))
    count = size if type(size) is int else len(listed)
    return Group(str(args.get("Process Group Name", "")), listed, count)


def _threads(
    events: Iterable[TraceEvent], rank_of: Callable[[TraceEvent], Any]
) -> Iterator[tuple[tuple[Any, str], str]]:
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            for part, kind in _THREADS.items():
                if part in event["args"]["name"]:
                    yield (rank_of(event), str(event["tid"])), kind


@cache
def _role_on_cpu(category: str, name: str) -> str:
    # torch up to 1.12 writes ranges as operators
    if name.startswith(STEP) and name.removeprefix(STEP).isdecimal():
        return "step"
    if name in (FORWARD, BACKWARD):
        return "pass"
    clue = next((clue for start, clue in _CLUES.items() if name.startswith(start)), "")
    if category == "operator":
        if name in GLOO_OPERATIONS:
            return "call"
        # nodes of the autograd engine have no namespace (MulBackward0)
        computes = "::" in name and not name.startswith(_NOT_COMPUTE)
        return clue or ("compute" if computes else "other")
    if name.startswith("gloo:") or name == LINK:
        return "collective"
    if name.startswith(("nccl:", "xccl:", "hccl:")):
        return "named"
    return "label" if unit_of(name) is not None else clue or "other"


@cache
def _role_on_device(category: str, name: str, reported: str | None) -> tuple[str, str]:
    """Return the role of an event on a device, and its name: the direction of a copy, the
    collective of a communication kernel."""
    if category == "launch":
        return category, name
    library = next((library for library, start in _LIBRARY.items() if start.match(name)), None)
    if library is None and operation_of(reported) is not None:
        library = "collective"  # by copies, or by kernels of another library
    if library is None:
        if category != "copy" and not _COPY_KERNEL.match(name):
            return category, name
        match = _COPY_KIND.match(name)
        return "copy", "unknown" if match is None else match[1] or "Memset"
    # one kernel serves several operations; torch records the operation that it launched
    operation = operation_of(reported) or operation_of(name.partition("(ncclDev")[0])
    return "nccl", f"{library}:{operation or reported or 'unknown'}"


@cache
def operation_of(name: str | None) -> str | None:
    """Return the collective that a record, a range or a kernel names, in the words of
    torch.distributed; None where it names no collective, as `coalesced`."""
    letters = re.sub("[^a-z]", "", (name or "").lower())
    return next((words for part, words in _OPERATIONS.items() if part in letters), None)
