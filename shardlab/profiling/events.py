"""Events of a trace as a table: role of each by its category and name, start and end.

| role | event |
|---|---|
| compute | operator on the CPU |
| call | operator that starts a collective of gloo |
| collective | on the CPU: operation of gloo, delay of an emulated link |
| step, pass, label | range that names a step, a pass or the unit whose values move |
| engine, optimizer, aside | node of the autograd engine, `Optimizer.step`, neither pass |
| kernel, copy, nccl | work on a device |
| launch | call on the CPU that launched such work |
| other | operator that launches or awaits collectives, any other range |
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from shardlab.core.errors import UserError
from shardlab.profiling.labels import BACKWARD, FORWARD, LINK, unit_of
from shardlab.profiling.trace_file import Event, load_trace, refusing

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
"""by the operator that starts it"""
WORK = ("kernel", "copy", "nccl")
ON_DEVICES = (*WORK, "launch")

_CATEGORIES = {
    "cpu_op": "operator",
    "user_annotation": "range",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    # of Meta's accelerator
    "mtia_ccp_events": "kernel",
    "mtia_runtime": "launch",
}
_CLUES = {
    # every node that the engine runs, hooks included (torch/csrc/autograd/engine.cpp)
    "autograd::engine::evaluate_function": "engine",
    # what FSDP2 and FSDP1 do after the last node
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
"""what runs gloo's collectives, and what launches the work of backward passes on devices"""
# RCCL's kernels have the names of NCCL's; the last one is vLLM's
_NCCL = re.compile(r"(?:void )?(?:[nr]ccl|hccl|(?:\w+::)*cross_device_reduce)")
_OPERATION = re.compile(r"AllReduce|AllGather|ReduceScatter|All[Tt]oAll|SendRecv|Broadcast|Reduce")
# ROCm up to 7.1 and MTIA record copies as kernels
_COPY_KERNEL = re.compile(r"MEMORY_COPY_|__amd_rocclr_(?:copy|fill)Buffer|dma_")
_COPY_KIND = re.compile(r"Memcpy (\w+)|(Memset|__amd_rocclr_fillBuffer)")
_LONGEST_US = 1e12
"""between two events of a trace: eleven days"""


class Events(NamedTuple):
    """Timed events of a trace, and its clock."""

    table: pd.DataFrame
    """rank, role, name (of a copy its direction, of NCCL the collective), thread or stream, start
    and end in us since the first event, correlation of a launch with what it launched"""
    threads: dict[tuple[Any, str], str]
    """`worker` or `engine`, by rank and thread"""
    base_ns: int
    first_us: float
    """time of the first event since the base"""
    world_size: int
    """of the job; 0 where the trace does not say"""


def read_events(path: str | Path) -> Events:
    """Return the events of every rank of a merged trace, or of the rank that wrote its own.

    Raises:
        UserError: an incomplete trace, or one without events.
    """
    with refusing(path):
        header, events = load_trace(path)
        job = header.get("distributedInfo", {})
        of_process = {int(pid): rank for pid, rank in (header.get("ranks") or {}).items()}
        alone = int(job.get("rank", 0))

        def rank_of(event: Event) -> Any:
            return of_process.get(event.get("pid", -1)) if of_process else alone

        first = next((float(event["ts"]) for event in events if event["ph"] == "X"), 0.0)
        table = _table(_rows(events, rank_of, first))
        for rank in sorted(set(of_process.values()) or {alone}):
            if not (table["rank"] == rank).any():
                raise UserError(f"{path}: no timed events of rank {rank}: trace the run again")
        # a merged trace holds that of each rank
        jobs = [job, *(value for value in job.values() if isinstance(value, dict))]
        return Events(
            table=table,
            threads=dict(_threads(events, rank_of)),
            base_ns=int(header.get("baseTimeNanoseconds", 0)),
            first_us=first,
            world_size=max(int(job.get("world_size", 0)) for job in jobs),
        )


def _rows(
    events: Iterable[Event], rank_of: Callable[[Event], Any], first: float
) -> Iterator[tuple[Any, ...]]:
    for event in events:
        category = _CATEGORIES.get(event.get("cat", ""))
        if category is None or event["ph"] != "X" or (rank := rank_of(event)) is None:
            continue
        name, args = event["name"], {}
        if category in ON_DEVICES:
            args = event.get("args", {})
            role, name = _role_on_device(category, name, args.get("Collective name", "unknown"))
        else:
            role = _role_on_cpu(category, name)
        # large floating-point numbers have no digits left for nanoseconds
        start = event["ts"] - first
        yield rank, role, name, str(event["tid"]), start, event["dur"], args.get("correlation")


def _table(rows: Iterable[tuple[Any, ...]]) -> pd.DataFrame:
    columns = ["rank", "role", "name", "thread", "start", "end", "correlation"]
    table = pd.DataFrame(list(rows), columns=columns)
    start = table["start"].to_numpy(dtype=float)
    end = start + table["end"].to_numpy(dtype=float)
    valid = (start > -_LONGEST_US) & (start <= end) & (end < _LONGEST_US)
    if not valid.all():
        number = np.argmin(valid)
        raise ValueError(f"an event from {start[number]} to {end[number]} us")
    return table.assign(start=start, end=end)


def _threads(
    events: Iterable[Event], rank_of: Callable[[Event], Any]
) -> Iterator[tuple[tuple[Any, str], str]]:
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            for part, kind in _THREADS.items():
                if part in event["args"]["name"]:
                    yield (rank_of(event), str(event["tid"])), kind


@cache
def _role_on_cpu(category: str, name: str) -> str:
    clue = next((clue for start, clue in _CLUES.items() if name.startswith(start)), "")
    if category == "operator":
        if name in GLOO_OPERATIONS:
            return "call"
        # nodes of the autograd engine have no namespace (MulBackward0)
        computes = "::" in name and not name.startswith(_NOT_COMPUTE)
        return clue or ("compute" if computes else "other")
    if name.startswith("gloo:") or name == LINK:
        return "collective"
    if name.startswith(STEP) and name.removeprefix(STEP).isdecimal():
        return "step"
    if name in (FORWARD, BACKWARD):
        return "pass"
    return "label" if unit_of(name) is not None else clue or "other"


@cache
def _role_on_device(category: str, name: str, reported: str) -> tuple[str, str]:
    """Return the role of an event on a device, and direction of a copy or name of a collective."""
    if category == "launch":
        return category, name
    if category == "copy" or _COPY_KERNEL.match(name):
        match = _COPY_KIND.match(name)
        return "copy", "unknown" if match is None else match[1] or "Memset"
    if _NCCL.match(name):
        # one generic kernel serves all operations; torch records which one it launched
        named = _OPERATION.search(name)
        return "nccl", f"nccl:{named[0] if named else reported}"
    return category, name
