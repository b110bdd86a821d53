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
happens during a pass belongs to it. What a device does belongs to the pass in which the CPU
launched it, however much later it runs; the pass then lasts from the first to the last of it, and
backward begins where forward has ended.

Skew is waiting for the last rank, separated from transfer. The i-th collective of an operation and
a unit in a step is the same one on all ranks. Until the last rank has begun it the others wait;
from then on bytes move. On one machine all ranks read one clock. Between machines the difference of
their clocks is added to one of the two and taken from the other: keep it below what is to be seen
(NTP: about a millisecond, PTP: microseconds).
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.config.run_record import Breakdown
from shardlab.core.errors import UserError
from shardlab.profiling.intervals import (
    EMPTY,
    Intervals,
    covers,
    difference,
    intersection,
    length,
    merge,
    union,
)
from shardlab.profiling.labels import BACKWARD
from shardlab.profiling.trace import EVER, Trace
from shardlab.profiling.trace_file import refusing
from shardlab.profiling.trace_reader import read_trace

OTHER = "other"
"""collectives that belong to no unit, such as that of the gradient norm"""
_PARTS = ("forward", "backward", "update")
_Kind = tuple[int, str, str]
"""step, operation, unit"""
_Key = tuple[_Kind, int]


class _Phases(NamedTuple):
    """Times of the matched collectives of one rank."""

    waiting: Intervals
    """some collective waits for a rank and none transfers"""
    transfer: Intervals


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
    comm_skew_ms: float | None
    """time waiting for the last of the ranks in the trace; None where ranks are missing"""
    comm_transfer_ms: float | None
    exposed_comm_ms: float
    copy_ms: float
    copy_ms_by_kind: dict[str, float]
    """HtoD, DtoH, ..., Memset; concurrent ones count twice in the sum"""
    exposed_copy_ms: float
    idle_ms: float
    forward_ms: float | None
    """like all times of passes, None in a step without a backward pass"""
    forward_compute_ms: float | None
    forward_comm_ms: float | None
    """communication during the pass"""
    backward_ms: float | None
    backward_compute_ms: float | None
    backward_comm_ms: float | None
    update_ms: float | None
    """the rest of the step"""
    update_compute_ms: float | None
    update_comm_ms: float | None
    optimizer_ms: float | None
    """the part of it in `Optimizer.step`; None where no optimizer says so"""


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
            _require_labels(traces)
            return step_times(traces)
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{path}: ')}") from None


def step_times(ranks: Mapping[int, Trace]) -> list[StepTimes]:
    """Return every step of every rank, in order."""
    waits = _phases(ranks)
    return [
        _within(rank, number, trace, waits[rank])
        for rank, trace in ranks.items()
        for number in trace.steps
    ]


def _require_labels(ranks: Mapping[int, Trace]) -> None:
    for rank, trace in ranks.items():
        if not trace.steps:
            raise UserError(f"rank {rank} has no profiled step (ProfilerStep): call Capture.step()")
        for number, step in trace.steps.items():
            if len(intersection(trace.backward, step)) == 0:
                raise UserError(
                    f"step {number} of rank {rank} has no backward pass: label it with "
                    f"record_function({BACKWARD!r})"
                )


def summarize(times: Sequence[StepTimes]) -> Breakdown:
    """Return means over steps and ranks; shares are shares of the summed times."""

    def mean(name: str) -> float:
        return statistics.fmean(getattr(t, name) for t in times)

    def means(name: str) -> dict[str, float]:
        mappings = [getattr(t, name) for t in times]
        keys = sorted({key for mapping in mappings for key in mapping})
        return {key: statistics.fmean(m.get(key, 0.0) for m in mappings) for key in keys}

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


def _within(rank: int, number: int, trace: Trace, waits: _Phases) -> StepTimes:
    """Return the times inside one step."""
    step = trace.steps[number]
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
        comm_ms_by_op=_by(near.collectives.operations, near.collectives.times, step),
        comm_ms_by_unit=_by(near.collectives.units, near.collectives.times, step),
        comm_skew_ms=_ms(intersection(waits.waiting, step)),
        comm_transfer_ms=_ms(intersection(waits.transfer, step)),
        exposed_comm_ms=_ms(exposed_comm),
        copy_ms=_ms(copies),
        copy_ms_by_kind=_by(near.copies.kinds, near.copies.times, step),
        exposed_copy_ms=_ms(exposed_copies),
        idle_ms=_ms(difference(step, busy)),
        **_times_of_passes(near, step, (trace.host_steps or trace.steps)[number]),
    )
    _check(result)
    return result


def _by(kinds: NDArray[np.str_], times: Intervals, step: Intervals) -> dict[str, float]:
    """Sum times, as they are read, by a property."""
    by_kind = {
        str(kind) or OTHER: intersection(merge(times[kinds == kind]), step)
        for kind in np.unique(kinds)
    }
    return {kind: _ms(within) for kind, within in by_kind.items() if len(within)}


def _ms(times: Intervals) -> float:
    return length(times) / 1000


def _check(times: StepTimes) -> None:
    parts = times.compute_ms + times.exposed_comm_ms + times.exposed_copy_ms + times.idle_ms
    if abs(parts - times.step_ms) > 1e-6 * times.step_ms:
        raise AssertionError(
            f"compute + exposed communication + exposed copies + idle = {parts} ms, but the step "
            f"took {times.step_ms} ms"
        )


def _times_of_passes(trace: Trace, step: Intervals, host: Intervals) -> dict[str, float | None]:
    """Return the milliseconds of each pass, and of the work launched by each.

    Args:
        step: when the step ran.
        host: when the CPU ran or launched it.

    Returns:
        None for each time if the step has no backward pass.
    """
    forward, backward = (intersection(t, host) for t in (trace.forward, trace.backward))
    optimizer = [intersection(calls, host) for calls in trace.clues.optimizer.values()]
    stepping = merge(np.concatenate([EMPTY, *optimizer]))
    if trace.on_device:
        first = _lasting(trace, forward)
        second = difference(_lasting(trace, backward), first)
        launched = (forward, backward, difference(EVER, union(forward, backward)))
        spans = (first, second, difference(step, union(first, second)))
        done = [
            (trace.kernels.during(window), trace.collectives.during(window)) for window in launched
        ]
        stepping = _lasting(trace, stepping)
    else:
        spans = (forward, backward, difference(step, union(forward, backward)))
        done = [(trace.compute(span), trace.communication(span)) for span in spans]
    known = len(backward) > 0
    result = {"optimizer_ms": _ms(intersection(stepping, step)) if len(stepping) else None}
    for part, span, (compute, comm) in zip(_PARTS, spans, done, strict=True):
        result[f"{part}_ms"] = _ms(intersection(span, step)) if known else None
        result[f"{part}_compute_ms"] = _ms(intersection(compute, step)) if known else None
        result[f"{part}_comm_ms"] = _ms(intersection(comm, step)) if known else None
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


def _phases(ranks: Mapping[int, Trace]) -> dict[int, _Phases]:
    """Return waiting and transfer time of the collectives of each rank.

    Those of a kind that the ranks have not equally often in a step are matched with none, nor is
    what began outside of the steps.
    """
    keys = {rank: list(_keys(trace)) for rank, trace in ranks.items()}
    totals = [Counter(kind for kind, _ in of_rank) for of_rank in keys.values()]
    begun: dict[_Key, float] = {}
    for rank, trace in ranks.items():
        for key, start in zip(keys[rank], trace.collectives.times[:, 0], strict=True):
            begun[key] = max(begun.get(key, -np.inf), float(start))

    def is_matched(kind: _Kind) -> bool:
        return kind[0] >= 0 and all(total[kind] == totals[0][kind] for total in totals)

    return {
        rank: _phases_of_rank(
            trace.collectives.times,
            np.array([is_matched(kind) for kind, _ in keys[rank]], dtype=bool),
            [begun[key] for key in keys[rank]],
        )
        for rank, trace in ranks.items()
    }


def _keys(trace: Trace) -> Iterator[_Key]:
    """Return kind and ordinal within its kind of each collective, in order."""
    step_of = np.full(len(trace.collectives.times), -1)
    for number, step in trace.steps.items():
        step_of[covers(step, trace.collectives.times[:, 0])] = number
    seen: Counter[_Kind] = Counter()
    collectives = trace.collectives
    for step, operation, unit in zip(
        step_of, collectives.operations, collectives.units, strict=True
    ):
        kind = (int(step), str(operation), str(unit))
        yield kind, seen[kind]
        seen[kind] += 1


def _phases_of_rank(
    times: Intervals, matched: NDArray[np.bool_], begun: Sequence[float]
) -> _Phases:
    if not matched.any():
        return _Phases(EMPTY, EMPTY)
    start, end = times[matched].T
    last = np.array(begun)[matched].clip(start, end)
    transfer = merge(np.column_stack([last, end]))
    return _Phases(difference(merge(times[matched]), transfer), transfer)
