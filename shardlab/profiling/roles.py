"""Kinds of events by category, and roles by name."""

import re
from functools import cache

from shardlab.profiling.attribution import GLOO_OPERATIONS
from shardlab.profiling.clues import clue_of
from shardlab.profiling.labels import BACKWARD, FORWARD, LINK, unit_of
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
