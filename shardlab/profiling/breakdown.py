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
import statistics
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

FORWARD, BACKWARD = "shardlab::forward", "shardlab::backward"
"""labels that engines put around the two passes"""

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
    forward_ms: float
    forward_compute_ms: float
    forward_comm_ms: float
    """communication during the pass"""
    backward_ms: float
    backward_compute_ms: float
    backward_comm_ms: float


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

    def mean(name: str) -> float:
        return statistics.fmean(getattr(t, name) for t in times)

    comm, exposed = mean("comm_ms"), mean("exposed_comm_ms")
    operations = sorted({op for t in times for op in t.comm_ms_by_op})
    return Breakdown(
        profiled_step_ms=mean("step_ms"),
        compute_ms=mean("compute_ms"),
        comm_ms_per_step=comm,
        comm_share=comm / mean("step_ms"),
        comm_ms_by_op={
            op: statistics.fmean(t.comm_ms_by_op.get(op, 0.0) for t in times) for op in operations
        },
        exposed_comm_ms=exposed,
        overlap=1 - exposed / comm if comm else 0.0,
        idle_ms=mean("idle_ms"),
        forward_ms=mean("forward_ms"),
        forward_compute_ms=mean("forward_compute_ms"),
        forward_comm_ms=mean("forward_comm_ms"),
        backward_ms=mean("backward_ms"),
        backward_compute_ms=mean("backward_compute_ms"),
        backward_comm_ms=mean("backward_comm_ms"),
        backward_comm_share=mean("backward_comm_ms") / mean("backward_ms"),
    )


@dataclass(frozen=True)
class _Sets:
    """The times of one rank, over all of its trace."""

    compute: Intervals
    operations: dict[str, Intervals]
    forward: Intervals
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

        def labelled(label: str) -> Intervals:
            return merge(trace.times[trace.named(label.__eq__) & (trace.kind == ANNOTATION)])

        return cls(
            compute=merge(trace.times[kernels if kernels.any() else _cpu_compute(trace)]),
            operations={op: merge(np.concatenate(t)) for op, t in operations.items()},
            forward=labelled(FORWARD),
            backward=labelled(BACKWARD),
        )

    def within(self, rank: int, number: int, step: Intervals) -> StepTimes:
        """The times inside of one step."""
        compute = intersection(self.compute, step)
        operations = {op: intersection(times, step) for op, times in self.operations.items()}
        comm = merge(np.concatenate([EMPTY, *operations.values()]))
        forward, backward = (intersection(each, step) for each in (self.forward, self.backward))
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
            forward_ms=length(forward) / 1000,
            forward_compute_ms=length(intersection(compute, forward)) / 1000,
            forward_comm_ms=length(intersection(comm, forward)) / 1000,
            backward_ms=length(backward) / 1000,
            backward_compute_ms=length(intersection(compute, backward)) / 1000,
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
    if name.startswith(("gloo:", "shardlab::link")):
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
