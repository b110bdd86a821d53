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

Skew is waiting for the last rank, separated from transfer. The i-th collective of an operation, a
unit and a process group in a step is the same one on all ranks of the group, or of the job where no
record names the group; the i-th message from one of two ranks is what the other receives. Until the
last rank has begun it the others wait; from then on bytes move. On one machine all ranks read one
clock. Between machines the difference of their clocks is added to one of the two and taken from the
other: keep it below what is to be seen (NTP: about a millisecond, PTP: microseconds). Nobody leaves
a collective before all have begun it: where the traces say so, clocks are apart, and beyond a tenth
of the time of the collectives the skew is unknown.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.core.errors import UserError
from shardlab.profiling.events import EventTable, Group, groups, read_events
from shardlab.profiling.intervals import (
    EMPTY,
    Intervals,
    covers,
    difference,
    intersection,
    length,
    merge,
    times_of,
    union,
)
from shardlab.profiling.labels import BACKWARD
from shardlab.profiling.trace import EVER, Trace, launched_during, traces_of
from shardlab.profiling.trace_file import refusing
from shardlab.results.result import Breakdown

OTHER = "other"
"""collectives that belong to no unit, such as that of the gradient norm"""
_PARTS = ("forward", "backward", "update")
_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""collectives that no rank leaves before all have begun them"""
_APART = 0.1
"""share of the time of collectives"""


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
    """time waiting for the last of the ranks of a group; None where ranks are missing, or messages
    cannot be matched"""
    comm_transfer_ms: float | None
    exposed_comm_ms: float
    exposed_comm_ms_by_op: dict[str, float]
    """by collective, likewise"""
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
    events = read_events(path)
    with refusing(path):
        traces = traces_of(events)
        for rank, trace in traces.items():
            if not trace.steps:
                raise UserError(
                    f"{path}: rank {rank} has no profiled step (ProfilerStep): call Capture.step()"
                )
            for number, step in trace.steps.items():
                if len(intersection(trace.backward, step)) == 0:
                    raise UserError(
                        f"{path}: step {number} of rank {rank} has no backward pass: label it with "
                        f"record_function({BACKWARD!r})"
                    )
        return step_times(traces)


def step_times(ranks: Mapping[int, Trace]) -> list[StepTimes]:
    """Return every step of every rank, in order."""
    waits, unmatched = _phases(ranks)
    return [
        _within(rank, number, trace, None if (rank, number) in unmatched else waits[rank])
        for rank, trace in ranks.items()
        for number in trace.steps
    ]


def summarize(times: Sequence[StepTimes]) -> Breakdown:
    """Return means over steps and ranks; shares are shares of the summed times."""
    columns = {name: [getattr(step, name) for step in times] for name in vars(times[0])}
    values: dict[str, Any] = {
        name: means_by_kind(column) if "_by_" in name else mean_known(column)
        for name, column in columns.items()
        if name in Breakdown.model_fields
    }
    comm, step = mean_known(columns["comm_ms"]), mean_known(columns["step_ms"])
    backward = values["backward_ms"]
    return Breakdown(
        profiled_step_ms=step,
        comm_ms_per_step=comm,
        comm_share=comm / step,
        overlap=1 - values["exposed_comm_ms"] / comm if comm else 0.0,
        backward_comm_share=values["backward_comm_ms"] / backward if backward else 0.0,
        **values,
    )


def means_by_kind(times: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each kind; where it is missing, it counts as 0."""
    steps = [*times]
    kinds = sorted({kind for step in steps for kind in step})
    return {kind: mean_known([step.get(kind, 0.0) for step in steps]) for kind in kinds}


def mean_known(times: Iterable[float | None]) -> float:
    """Return the mean of the times that are known; not a number where none is."""
    known = [time for time in times if time is not None]
    return float(np.mean(known)) if known else math.nan


def _within(
    rank: int, number: int, trace: Trace, waits: tuple[Intervals, Intervals] | None
) -> StepTimes:
    """Return the times inside one step.

    Args:
        waits: when collectives wait and transfer; None: unknown.
    """
    step = trace.steps[number]
    skew, transfer = (None, None) if waits is None else (_ms(intersection(w, step)) for w in waits)
    near = trace.near(step)
    compute, comm = near.compute(step), near.communication(step)
    copies = intersection(merge(times_of(near.copies)), step)
    exposed_comm = difference(comm, compute)
    exposed_copies = difference(difference(copies, compute), comm)
    busy = union(union(compute, comm), copies)
    result = StepTimes(
        rank=rank,
        step=number,
        step_ms=_ms(step),
        compute_ms=_ms(compute),
        comm_ms=_ms(comm),
        comm_ms_by_op=_by(near.collectives, "name", step),
        comm_ms_by_unit=_by(near.collectives, "unit", step),
        comm_skew_ms=skew,
        comm_transfer_ms=transfer,
        exposed_comm_ms=_ms(exposed_comm),
        exposed_comm_ms_by_op=_by(near.collectives, "name", exposed_comm),
        copy_ms=_ms(copies),
        copy_ms_by_kind=_by(near.copies, "name", step),
        exposed_copy_ms=_ms(exposed_copies),
        idle_ms=_ms(difference(step, busy)),
        **_times_of_passes(near, step, (trace.host_steps or trace.steps)[number]),
    )
    _check(result)
    return result


def _by(work: EventTable, column: str, window: Intervals) -> dict[str, float]:
    """Return times within a window by a property."""
    by_kind = {
        kind or OTHER: intersection(merge(times_of(of_kind)), window)
        for kind, of_kind in groups(work, work[column]).items()
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
            (launched_during(trace.kernels, window), launched_during(trace.collectives, window))
            for window in launched
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
        done = np.concatenate([launched_during(work, window) for work in trace.work])
        if len(done):
            spans.append(np.array([[done[:, 0].min(), done[:, 1].max()]]))
    return merge(np.concatenate(spans))


def _phases(
    ranks: Mapping[int, Trace],
) -> tuple[dict[int, tuple[Intervals, Intervals]], set[tuple[int, int]]]:
    """Return when some collective of each rank waits for a rank and none transfers, and transfers;
    and ranks and steps of which that is unknown.

    Collectives of no known group that the ranks have not equally often in a step are matched with
    none, nor is what began outside of the steps. Unknown are steps that some rank does not have, or
    with a message between two ranks or a group's collective that nothing matches; and all steps of
    ranks whose clocks are apart.
    """
    waiting: dict[int, list[Intervals]] = {rank: [EMPTY] for rank in ranks}
    transfer: dict[int, list[Intervals]] = {rank: [EMPTY] for rank in ranks}
    kinds: dict[_CollectiveKey, dict[int, EventTable]] = defaultdict(dict)
    for rank, trace in ranks.items():
        for kind, of_kind in _by_kind(rank, trace, sorted(ranks)).items():
            kinds[kind][rank] = of_kind
    unknown: set[tuple[int, int]] = set()
    apart: dict[tuple[int, ...], float] = defaultdict(float)
    for kind, of_ranks in kinds.items():
        counts = {*map(len, of_ranks.values())}
        if len(of_ranks) == (kind.size or len(ranks)) and len(counts) == 1:
            last = np.max([events["start"] for events in of_ranks.values()], axis=0)
            apart[tuple(of_ranks)] += _left_early(kind, of_ranks, last)
            for rank, events in of_ranks.items():
                begun = np.clip(last, events["start"], events["end"])
                waiting[rank].append(times_of(events))
                transfer[rank].append(np.column_stack([begun, events["end"]]))
        elif kind.size or not all(kind.step in trace.steps for trace in ranks.values()):
            unknown |= {(rank, kind.step) for rank in of_ranks}
    for together, excess in apart.items():
        if excess > 0:
            unknown |= {(rank, number) for rank in together for number in ranks[rank].steps}
    phases = {}
    for rank in ranks:
        moving = merge(np.concatenate(transfer[rank]))
        phases[rank] = difference(merge(np.concatenate(waiting[rank])), moving), moving
    return phases, unknown


def _left_early(
    kind: "_CollectiveKey", of_ranks: Mapping[int, EventTable], last: NDArray[np.float64]
) -> float:
    """Return for how long ranks left collectives before the last one began them, beyond what
    clocks may differ by.

    Args:
        last: when the last rank began each.
    """
    library, _, operation = kind.name.rpartition(":")
    sender = operation.removeprefix("from ")
    # copies end when they have what they fetch
    together = operation in _TOGETHER and library != "collective"
    if sender == operation and not together:
        return 0.0
    left = [events["end"] for rank, events in of_ranks.items() if str(rank) != sender]
    lasting = np.mean([events["end"] - events["start"] for events in of_ranks.values()], axis=0)
    return float(np.sum(np.maximum(0, last - np.min(left, axis=0)) - _APART * lasting))


class _CollectiveKey(NamedTuple):
    """Collectives that are matched in their order."""

    step: int
    name: str
    unit: str
    group: Group
    size: int
    """number of ranks that take part; 0: unknown"""


def _by_kind(rank: int, trace: Trace, ranks: Sequence[int]) -> dict[_CollectiveKey, EventTable]:
    """Return the collectives of a rank that began in a step.

    Args:
        ranks: of the job.
    """
    sent = trace.collectives
    step_of = np.full(len(sent), -1)
    for number, step in trace.steps.items():
        step_of[covers(step, sent["start"])] = number
    sent, numbers = sent[step_of >= 0], step_of[step_of >= 0].tolist()
    columns = zip(numbers, sent["name"], sent["unit"], sent["group"], strict=True)
    return groups(sent, (_kind(rank, *column, ranks) for column in columns))


def _kind(
    rank: int, step: int, name: str, unit: str, group: Group, ranks: Sequence[int]
) -> _CollectiveKey:
    """Return with which collectives one is matched."""
    library, _, operation = name.rpartition(":")
    if operation not in ("send", "recv"):
        return _CollectiveKey(step, name, unit, group, group.size)
    pair = group.ranks if group.size else tuple(ranks)
    if len(pair) == 2 and rank in pair:
        sender = rank if operation == "send" else sum(pair) - rank
        return _CollectiveKey(step, f"{library}:from {sender}", unit, group, 2)
    # of more ranks nothing says to which of them it goes: only what all do at once is matched
    size = -1 if group.size else 0
    return _CollectiveKey(step, name, unit, group, size)
