"""Where the time of each profiled step went: compute, exposed communication, idle.

Per rank and step, with intervals of time as sets:

* communication: what gloo's worker threads carried out (`gloo:*`), its messages to one other rank
  from the time when they were posted to the end of the wait for them (`gloo:send`, `gloo:recv`),
  and NCCL's kernels. Waiting for the other ranks is part of it.
* compute: operators on the CPU, outside of gloo's worker threads. Not those that launch or await
  collectives or belong to the autograd engine, and none that holds such an operator or a labelled
  range: wrappers last as long as a collective that they wait for and would fake an overlap. On a
  rank with device kernels those alone are its compute (NCCL's excepted); its CPU operators only
  launch them.
* exposed communication: communication without compute. Overlap is the share of communication that
  is not exposed; a job without communication has overlap 0.
* idle: neither. compute + exposed + idle = step, which is checked.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shardlab.core.errors import UserError
from shardlab.core.records import Breakdown
from shardlab.profiling.intervals import (
    EMPTY,
    Intervals,
    difference,
    intersection,
    length,
    merge,
    union,
)
from shardlab.profiling.trace import (
    ANNOTATION,
    KERNEL,
    OPERATOR,
    Trace,
    holding,
    read_trace,
)

BACKWARD = "shardlab::backward"
"""label that engines put around the backward pass"""

_STEP = re.compile(r"ProfilerStep#(\d+)")
_NCCL = re.compile(r"nccl(?:Dev)?Kernel_([A-Za-z]+)")
# operators that launch or await collectives, or run hooks that do
_NOT_COMPUTE = ("autograd::", "torch::autograd::", "c10d::", "_c10d_functional::")


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, milliseconds."""

    rank: int
    step: int
    step_ms: float
    compute_ms: float
    comm_ms: float
    comm_ms_by_op: dict[str, float]
    """by collective; those that run side by side count twice in the sum"""
    exposed_comm_ms: float
    idle_ms: float
    backward_ms: float
    backward_comm_ms: float
    """communication during the backward pass"""


def analyse(path: str | Path) -> Breakdown:
    """The mean over the steps and ranks of a merged trace.

    Raises:
        UserError: the trace holds no step or no backward pass, or is not whole.
    """
    return summarize(read_steps(path))


def read_steps(path: str | Path) -> list[StepTimes]:
    """Every profiled step of every rank of a merged trace.

    Raises:
        UserError: the trace holds no step or no backward pass, or is not whole.
    """
    traces = read_trace(path)
    try:
        return [t for rank in traces for t in step_times(rank, traces[rank])]
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def step_times(rank: int, trace: Trace) -> list[StepTimes]:
    """Every profiled step of one rank, in order.

    Raises:
        UserError: no step, or a step without a labelled backward pass.
    """
    steps = {
        int(match[1]): trace.times[trace.named(name.__eq__) & (trace.kind == ANNOTATION)]
        for name in trace.names
        if (match := _STEP.fullmatch(name))
    }
    if not any(map(len, steps.values())):
        raise UserError(f"rank {rank} has no profiled step (ProfilerStep): call Capture.step()")
    sets = _Sets.of(trace)
    return [
        sets.within(rank, step, merge(times)) for step, times in sorted(steps.items()) if len(times)
    ]


def summarize(times: Sequence[StepTimes]) -> Breakdown:
    """Means over steps and ranks; shares are shares of the summed times."""
    count = len(times)
    total = sum(t.step_ms for t in times)
    comm = sum(t.comm_ms for t in times)
    exposed = sum(t.exposed_comm_ms for t in times)
    operations = sorted({op for t in times for op in t.comm_ms_by_op})
    return Breakdown(
        profiled_step_ms=total / count,
        compute_ms=sum(t.compute_ms for t in times) / count,
        comm_ms_per_step=comm / count,
        comm_share=comm / total,
        comm_ms_by_op={
            op: sum(t.comm_ms_by_op.get(op, 0.0) for t in times) / count for op in operations
        },
        exposed_comm_ms=exposed / count,
        overlap=1 - exposed / comm if comm else 0.0,
        idle_ms=sum(t.idle_ms for t in times) / count,
        backward_comm_share=sum(t.backward_comm_ms for t in times)
        / sum(t.backward_ms for t in times),
    )


@dataclass(frozen=True)
class _Sets:
    """The times of one rank, over all of its trace."""

    compute: Intervals
    operations: dict[str, Intervals]
    backward: Intervals

    @classmethod
    def of(cls, trace: Trace) -> "_Sets":
        # an operator may carry the name of a collective that others carry out
        collective = trace.named(lambda name: bool(_operation(name))) & (trace.kind != OPERATOR)
        operations: dict[str, list[Intervals]] = defaultdict(list)
        for code in np.unique(trace.name[collective]):
            times = trace.times[collective & (trace.name == code)]
            operations[_operation(trace.names[code])].append(times)
        kernels = (trace.kind == KERNEL) & ~collective
        backward = trace.named(BACKWARD.__eq__) & (trace.kind == ANNOTATION)
        return cls(
            compute=merge(trace.times[kernels if kernels.any() else _cpu_compute(trace)]),
            operations={op: merge(np.concatenate(t)) for op, t in operations.items()},
            backward=merge(trace.times[backward]),
        )

    def within(self, rank: int, number: int, step: Intervals) -> StepTimes:
        """The times inside of one step."""
        compute = intersection(self.compute, step)
        operations = {op: intersection(times, step) for op, times in self.operations.items()}
        comm = merge(np.concatenate([EMPTY, *operations.values()]))
        backward = intersection(self.backward, step)
        if len(backward) == 0:
            raise UserError(
                f"step {number} of rank {rank} has no backward pass: label it with "
                f"record_function({BACKWARD!r})"
            )
        result = StepTimes(
            rank=rank,
            step=number,
            step_ms=length(step) / 1000,
            compute_ms=length(compute) / 1000,
            comm_ms=length(comm) / 1000,
            comm_ms_by_op={op: length(t) / 1000 for op, t in operations.items() if len(t)},
            exposed_comm_ms=length(difference(comm, compute)) / 1000,
            idle_ms=length(difference(step, union(compute, comm))) / 1000,
            backward_ms=length(backward) / 1000,
            backward_comm_ms=length(intersection(comm, backward)) / 1000,
        )
        _check(result)
        return result


def _check(times: StepTimes) -> None:
    parts = times.compute_ms + times.exposed_comm_ms + times.idle_ms
    if abs(parts - times.step_ms) > 1e-6 * times.step_ms:
        raise AssertionError(
            f"compute + exposed + idle = {parts} ms, but the step took {times.step_ms} ms"
        )


def _operation(name: str) -> str:
    """The collective that an event of this name carries out; empty if it is none."""
    if name.startswith("gloo:"):
        return name
    match = _NCCL.match(name)
    return f"nccl:{match[1]}" if match else ""


def _cpu_compute(trace: Trace) -> NDArray[np.bool_]:
    operator = (trace.kind == OPERATOR) & trace.named(_computes)
    other = ((trace.kind == OPERATOR) | (trace.kind == ANNOTATION)) & ~operator
    working = ~np.isin(trace.thread, list(trace.workers))
    return operator & working & ~holding(trace, operator, other)


def _computes(operator: str) -> bool:
    # nodes of the autograd engine have no namespace (MulBackward0)
    return "::" in operator and not operator.startswith(_NOT_COMPUTE)
