"""Breakdown of each profiled step: compute, communication, copies, idle.

Per rank and step, with intervals of time as sets:

* communication: what gloo's worker threads ran (`gloo:*`), its messages to one other rank
  from the time when they were posted to the end of the wait for them (`gloo:send`, `gloo:recv`),
  what an emulated link adds to that, and NCCL's kernels. Waiting for other ranks is part of it.
* compute: operators on the CPU, outside of gloo's worker threads. Not those that launch or await
  collectives or belong to the autograd engine, and none that holds such an operator or a labelled
  range: wrappers last as long as a collective that they wait for and would fake an overlap. On a
  rank with device kernels those alone are its compute (NCCL's excepted); its CPU operators only
  launch them.
* copies: what moves to, from and on devices. On the CPU a copy is compute.
* exposed communication: communication without compute. Overlap is the share of communication that
  is not exposed; a job without communication has overlap 0. Exposed copies: without either.
* idle: none of them. compute + exposed communication + exposed copies + idle = step, which is
  checked (the identity of TraceLens, `gpu_event_analyser.py`).

Forward and backward are the labelled ranges, update is the rest of the step. On the CPU what
happens during a range belongs to it. What a device does belongs to the range in which the CPU
launched it, however much later it runs; the pass then lasts from the first to the last of it, and
backward begins where forward has ended.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardlab.core.errors import UserError
from shardlab.profiling.analysis.intervals import (
    EMPTY,
    Intervals,
    difference,
    intersection,
    length,
    merge,
    union,
)
from shardlab.profiling.analysis.skew import Phases, phases
from shardlab.profiling.analysis.trace import Trace
from shardlab.profiling.analysis.trace_reader import read_trace
from shardlab.profiling.traces.labels import BACKWARD
from shardlab.profiling.traces.trace_file import refusing
from shardlab.records.run import Breakdown

OTHER = "other"
"""collectives that belong to no unit, such as that of the gradient norm"""


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, milliseconds."""

    rank: int
    step: int
    step_ms: float
    compute_ms: float
    comm_ms: float
    comm_ms_by_op: dict[str, float]
    """by collective; concurrent ones count twice in the sum"""
    comm_ms_by_unit: dict[str, float]
    """by the unit whose values moved, likewise"""
    comm_skew_ms: float
    """time waiting for the last of the ranks in the trace"""
    comm_transfer_ms: float
    exposed_comm_ms: float
    copy_ms: float
    exposed_copy_ms: float
    idle_ms: float
    forward_ms: float
    forward_compute_ms: float
    forward_comm_ms: float
    """communication during the pass"""
    backward_ms: float
    backward_compute_ms: float
    backward_comm_ms: float
    update_ms: float
    """the rest of the step"""
    update_compute_ms: float
    update_comm_ms: float


_PARTS = ("forward", "backward", "update")
_EVER = np.array([[-np.inf, np.inf]])


def analyse(path: str | Path) -> Breakdown:
    """Return the mean over the steps and ranks of a merged trace.

    Raises:
        UserError: the trace holds no step or no backward pass, or is incomplete.
    """
    return summarize(read_steps(path))


def read_steps(path: str | Path) -> list[StepTimes]:
    """Return every profiled step of every rank of a merged trace, or of one rank's own.

    Raises:
        UserError: the trace holds no step or no backward pass, or is incomplete.
    """
    traces = read_trace(path)
    try:
        with refusing(path):
            return step_times(traces)
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def step_times(ranks: Mapping[int, Trace]) -> list[StepTimes]:
    """Return every profiled step of every rank, in order.

    Raises:
        UserError: a rank without a step, or a step without a labelled backward pass.
    """
    for rank, trace in ranks.items():
        if not trace.steps:
            raise UserError(f"rank {rank} has no profiled step (ProfilerStep): call Capture.step()")
    waits = phases(ranks)
    return [
        _within(rank, number, trace, waits[rank])
        for rank, trace in ranks.items()
        for number in trace.steps
    ]


def summarize(times: Sequence[StepTimes]) -> Breakdown:
    """Return means over steps and ranks; shares are shares of the summed times."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(t, name) for t in times)

    def means(name: str) -> dict[str, float]:
        found = [getattr(t, name) for t in times]
        keys = sorted({key for each in found for key in each})
        return {key: statistics.fmean(each.get(key, 0.0) for each in found) for key in keys}

    comm, exposed, backward = (mean(n) for n in ("comm_ms", "exposed_comm_ms", "backward_ms"))
    shared = Breakdown.model_fields.keys() & {field.name for field in fields(StepTimes)}
    values: dict[str, Any] = {n: means(n) if "_by_" in n else mean(n) for n in shared}
    return Breakdown(
        profiled_step_ms=mean("step_ms"),
        comm_ms_per_step=comm,
        comm_share=comm / mean("step_ms"),
        overlap=1 - exposed / comm if comm else 0.0,
        backward_comm_share=mean("backward_comm_ms") / backward if backward else 0.0,
        **values,
    )


def _within(rank: int, number: int, trace: Trace, waits: Phases) -> StepTimes:
    """Return the times inside one step."""
    step = trace.steps[number]
    if len(intersection(trace.backward, step)) == 0:
        raise UserError(
            f"step {number} of rank {rank} has no backward pass: label it with "
            f"record_function({BACKWARD!r})"
        )
    near = trace.near(step)
    compute, comm, copies = near.compute(step), near.communication(step), near.copied(step)
    exposed_comm = difference(comm, compute)
    exposed_copies = difference(difference(copies, compute), comm)
    busy = union(union(compute, comm), copies)
    result = StepTimes(
        rank=rank,
        step=number,
        step_ms=_ms(step),
        compute_ms=_ms(compute),
        comm_ms=_ms(comm),
        comm_ms_by_op=_by(near.collectives.operations, near, step),
        comm_ms_by_unit=_by(near.collectives.units, near, step),
        comm_skew_ms=_ms(intersection(waits.waiting, step)),
        comm_transfer_ms=_ms(intersection(waits.transfer, step)),
        exposed_comm_ms=_ms(exposed_comm),
        copy_ms=_ms(copies),
        exposed_copy_ms=_ms(exposed_copies),
        idle_ms=_ms(difference(step, busy)),
        **_passes(near, step),
    )
    _check(result)
    return result


def _passes(trace: Trace, step: Intervals) -> dict[str, float]:
    """Return the time of forward, backward and update, and of the work launched by each."""
    forward, backward = (intersection(each, step) for each in (trace.forward, trace.backward))
    if trace.on_device:
        first = _lasting(trace, forward)
        second = difference(_lasting(trace, backward), first)
        launched = (forward, backward, difference(_EVER, union(forward, backward)))
        spans = (first, second, difference(step, union(first, second)))
        done = [
            (trace.kernels.during(window), trace.collectives.during(window)) for window in launched
        ]
    else:
        spans = (forward, backward, difference(step, union(forward, backward)))
        done = [(trace.compute(span), trace.communication(span)) for span in spans]
    result = {}
    for part, span, (compute, comm) in zip(_PARTS, spans, done, strict=True):
        result[f"{part}_ms"] = _ms(intersection(span, step))
        result[f"{part}_compute_ms"] = _ms(intersection(compute, step))
        result[f"{part}_comm_ms"] = _ms(intersection(comm, step))
    return result


def _lasting(trace: Trace, labelled: Intervals) -> Intervals:
    """Return the span on a device from the first to the last kernel that each labelled range
    launched."""
    spans = [EMPTY]
    for start, end in labelled:
        window = np.array([[start, end]])
        done = np.concatenate([work.during(window) for work in trace.work])
        if len(done):
            spans.append(np.array([[done[:, 0].min(), done[:, 1].max()]]))
    return merge(np.concatenate(spans))


def _by(kinds: NDArray[np.str_], trace: Trace, step: Intervals) -> dict[str, float]:
    """Sum communication by a property of the collectives."""
    times = {
        str(kind) or OTHER: intersection(merge(trace.collectives.times[kinds == kind]), step)
        for kind in np.unique(kinds)
    }
    return {kind: _ms(each) for kind, each in times.items() if len(each)}


def _ms(times: Intervals) -> float:
    return length(times) / 1000


def _check(times: StepTimes) -> None:
    parts = times.compute_ms + times.exposed_comm_ms + times.exposed_copy_ms + times.idle_ms
    if abs(parts - times.step_ms) > 1e-6 * times.step_ms:
        raise AssertionError(
            f"compute + exposed communication + exposed copies + idle = {parts} ms, but the step "
            f"took {times.step_ms} ms"
        )
