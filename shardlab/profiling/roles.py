"""Kinds of events by category, roles by name, and the unit whose values a collective moves.

Labels stand around the call that starts a collective, on the thread that makes it. NCCL's kernels
are traced back to that call by the correlation of their launch, messages to one other rank happen
inside of it. What gloo's worker threads run is not linked to its call: the i-th call of an
operation is matched to the i-th that runs. Two workers may begin two collectives in the other order
than they were called, then these two exchange their units.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from shardlab.profiling.labels import BACKWARD, FORWARD, LINK, unit_of
from shardlab.profiling.operators import RESOLUTION_US
from shardlab.profiling.trace import clue_of
from shardlab.profiling.trace_file import Event

OPERATOR, RANGE, KERNEL, COPY, LAUNCH = range(5)
KINDS = {
    "cpu_op": OPERATOR,
    "user_annotation": RANGE,
    "kernel": KERNEL,
    "gpu_memcpy": COPY,
    "gpu_memset": COPY,
    "cuda_runtime": LAUNCH,
    "cuda_driver": LAUNCH,
    # of Meta's accelerator
    "mtia_ccp_events": KERNEL,
    "mtia_runtime": LAUNCH,
}
OTHER, COMPUTE, CALL, STEP, LABEL, COLLECTIVE, CLUE = range(7)
"""role of an operator or range"""

STEP_NAME = re.compile(r"ProfilerStep#(\d+)")
# RCCL's kernels have the names of NCCL's; the last one is vLLM's
_NCCL = re.compile(r"(?:void )?(?:[nr]ccl|hccl|(?:\w+::)*cross_device_reduce)")
_OPERATION = re.compile(r"AllReduce|AllGather|ReduceScatter|All[Tt]oAll|SendRecv|Broadcast|Reduce")
# ROCm up to 7.1 and MTIA record copies as kernels
COPY_KERNEL = re.compile(r"MEMORY_COPY_|__amd_rocclr_(?:copy|fill)Buffer|dma_")
_COPY_KIND = re.compile(r"Memcpy (\w+)|(Memset|__amd_rocclr_fillBuffer)")
# operators that launch or await collectives, or run hooks that do
_NOT_COMPUTE = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")


@cache
def role_of(kind: int, name: str) -> int:
    """Return the role of an operator or a range."""
    if kind == OPERATOR:
        if name in GLOO_OPERATIONS:
            return CALL
        if clue_of(name):
            return CLUE
        # nodes of the autograd engine have no namespace (MulBackward0)
        return COMPUTE if "::" in name and not name.startswith(_NOT_COMPUTE) else OTHER
    if name.startswith("gloo:") or name == LINK:
        return COLLECTIVE
    if STEP_NAME.fullmatch(name):
        return STEP
    if name in (FORWARD, BACKWARD) or unit_of(name) is not None:
        return LABEL
    return CLUE if clue_of(name) else OTHER


def collective_of(event: Event) -> str:
    """Return the collective that a kernel runs; empty if it is none."""
    if _NCCL.match(event["name"]) is None:
        return ""
    # one generic kernel serves all operations; torch records which one it launched
    named = _OPERATION.search(event["name"])
    return f"nccl:{named[0] if named else event.get('args', {}).get('Collective name', 'unknown')}"


def kind_of_copy(name: str) -> str:
    """Return the direction of a copy, or Memset."""
    match = _COPY_KIND.match(name)
    return "unknown" if match is None else match[1] or "Memset"


class Label(NamedTuple):
    """A labelled range in one thread that names the unit whose values move in it."""

    start: float
    end: float
    unit: str


class Call(NamedTuple):
    """An operator that starts a collective."""

    start: float
    thread: int
    name: str


Labels = Mapping[int, Sequence[Label]]
"""by thread"""

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


def units_of_calls(labels: Labels, calls: Sequence[tuple[float, int]]) -> list[str]:
    """Return the unit of each call by time and thread: that of the innermost label around it.

    Returns:
        empty where there is no label.
    """
    units = [""] * len(calls)
    by_thread: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for index, (time, thread) in enumerate(calls):
        by_thread[thread].append((time, index))
    for thread, wanted in by_thread.items():
        wanted.sort()
        innermost = _innermost(sorted(labels.get(thread, ())), [time for time, _ in wanted])
        for (_, index), unit in zip(wanted, innermost, strict=True):
            units[index] = unit
    return units


def calls_of_worker(calls: Sequence[Call], operations: Sequence[str]) -> list[Call | None]:
    """Return the call of what gloo's workers ran, in the order of its start.

    Returns:
        None where the calls are not as many, so that they cannot be matched.
    """
    matched: list[Call | None] = [None] * len(operations)
    for operation in set(operations):
        of_this = sorted(c for c in calls if GLOO_OPERATIONS.get(c.name) == operation)
        indices = [i for i, name in enumerate(operations) if name == operation]
        if len(of_this) == len(indices):
            for index, call in zip(indices, of_this, strict=True):
                matched[index] = call
    return matched


def _innermost(labels: Sequence[Label], times: Sequence[float]) -> Iterator[str]:
    """Match labels of one thread, which are nested or disjoint; both arguments in order of time."""
    open_: list[Label] = []
    waiting = iter(labels)
    following = next(waiting, None)
    for time in times:
        while following is not None and following.start <= time + RESOLUTION_US:
            open_.append(following)
            following = next(waiting, None)
        while open_ and open_[-1].end < time:
            open_.pop()
        yield open_[-1].unit if open_ else ""
