"""Breakdown of each profiled step: compute, communication, copies, idle.

Per rank and step, with intervals of time as sets:

* communication: collectives of gloo's worker threads (`gloo:*`), point-to-point messages of gloo
  from their post to the end of the wait (`gloo:send`, `gloo:recv`), the delay that an emulated link
  adds, and NCCL's kernels. The wait for other ranks is part of it.
* compute on a rank without device kernels: operators on the CPU, outside of gloo's worker threads.
  Operators that launch or await collectives, nodes of the autograd engine, and operators that hold
  one of these or a labelled range do not count: such wrappers last as long as the collective that
  they wait for, and would fake an overlap.
* compute on a rank with device kernels: the kernels, except NCCL's. Operators on the CPU only
  launch them.
* copies: transfers to, from and on devices. On the CPU a copy is compute.
* exposed communication: communication without compute. Overlap is the share of communication that
  is not exposed; a job without communication has overlap 0.
* exposed copies: copies without compute and without communication.
* idle: the rest of the step. compute + exposed communication + exposed copies + idle = step is
  checked (the identity of TraceLens, `gpu_event_analyser.py`).

Forward and backward are the labelled ranges; update is the rest of the step. On the CPU, work
belongs to the pass during which it runs. On a device, work belongs to the pass in which the CPU
launched it; the pass then lasts from the start of its first work to the end of its last work, and
backward begins where forward has ended.

Skew is the wait for the last rank, separated from transfer. The i-th collective of an operation, a
unit and a process group in a step is the same collective on all ranks of the group (of the job,
where no record names the group). The i-th message from one of two ranks is the i-th message that
the other receives. A rank waits until the last rank has begun; from then on bytes move.

On one machine all ranks read one clock. Between machines, a difference of the clocks adds to the
skew of one and reduces the skew of the other: keep it below the times of interest (NTP: about a
millisecond, PTP: microseconds). No rank leaves a collective before all ranks have begun it. Where
traces show this, the clocks differ; where they differ by more than a tenth of the time of the
collectives, the skew is unknown.
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
"""Collectives that belong to no unit, such as the all-reduce of the gradient norm."""
_PARTS = ("forward", "backward", "update")
_SYNCHRONISING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""Collectives that no rank leaves before all ranks have begun them."""
_CLOCK_TOLERANCE = 0.1
"""Accepted difference of clocks, as a share of the time of collectives."""


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank, milliseconds."""

    rank: int
    step: int
    step_ms: float
    compute_ms: float
    comm_ms: float
    comm_ms_by_op: dict[str, float]
    """Communication by collective; concurrent collectives count twice in the sum."""
    comm_ms_by_unit: dict[str, float]
    """Communication by the unit whose values moved; concurrent collectives count twice in the sum.
    """
    comm_skew_ms: float | None
    """Wait for the last rank of a group; None where ranks are missing or messages cannot be
    matched."""
    comm_transfer_ms: float | None
    exposed_comm_ms: float
    exposed_comm_ms_by_op: dict[str, float]
    """Exposed communication by collective; concurrent collectives count twice in the sum."""
    copy_ms: float
    copy_ms_by_kind: dict[str, float]
    """Copies by kind: HtoD, DtoH, ..., Memset; concurrent copies count twice in the sum."""
    exposed_copy_ms: float
    idle_ms: float
    forward_ms: float | None
    """Forward pass. All times of passes are None in a step without a backward pass."""
    forward_compute_ms: float | None
    forward_comm_ms: float | None
    """Communication during the forward pass."""
    backward_ms: float | None
    backward_compute_ms: float | None
    backward_comm_ms: float | None
    update_ms: float | None
    """Rest of the step."""
    update_compute_ms: float | None
    update_comm_ms: float | None
    optimizer_ms: float | None
    """Time in `Optimizer.step`, a part of the update; None where no optimizer is annotated."""


def analyse(path: str | Path) -> Breakdown:
    """Return the mean over the steps and ranks of a merged trace.

    Raises:
        UserError: the trace holds no step or no backward pass, or is incomplete.
    """
    return summarize(read_steps(path))


def read_steps(path: str | Path) -> list[StepTimes]:
    """Return every profiled step of every rank of a merged trace, or of the trace of one rank.

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
    """Return means over steps and ranks; shares are ratios of summed times."""
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
    """Return the mean of each kind; a missing kind counts as 0."""
    steps = [*times]
    kinds = sorted({kind for step in steps for kind in step})
    return {kind: mean_known([step.get(kind, 0.0) for step in steps]) for kind in kinds}


def mean_known(times: Iterable[float | None]) -> float:
    """Return the mean of the times that are not None; NaN where all are None."""
    values = [time for time in times if time is not None]
    return float(np.mean(values)) if values else math.nan


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
    """Return the milliseconds of work within a window, by the value of a column."""
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
    """Return the milliseconds of each pass, and of the work that each pass launched.

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
    has_passes = len(backward) > 0
    result = {"optimizer_ms": _ms(intersection(stepping, step)) if len(stepping) else None}
    for part, span, (compute, comm) in zip(_PARTS, spans, done, strict=True):
        result[f"{part}_ms"] = _ms(intersection(span, step)) if has_passes else None
        result[f"{part}_compute_ms"] = _ms(intersection(compute, step)) if has_passes else None
        result[f"{part}_comm_ms"] = _ms(intersection(comm, step)) if has_passes else None
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
    """Return, by rank, when its collectives wait for a rank and none of them transfers, and when
    they transfer; and the (rank, step) pairs for which this is unknown.

    Collectives that begin outside of the steps are not matched. Collectives of an unknown group are
    not matched where the ranks have different numbers of them in a step. A step is unknown where a
    rank does not have it, or where a point-to-point message or a collective of a known group has no
    match. All steps of ranks with different clocks are unknown.
    """
    waiting: dict[int, list[Intervals]] = {rank: [EMPTY] for rank in ranks}
    transfer: dict[int, list[Intervals]] = {rank: [EMPTY] for rank in ranks}
    kinds: dict[_CollectiveKey, dict[int, EventTable]] = defaultdict(dict)
    for rank, trace in ranks.items():
        for kind, of_kind in _by_kind(rank, trace, sorted(ranks)).items():
            kinds[kind][rank] = of_kind
    unknown: set[tuple[int, int]] = set()
    clock_excess: dict[tuple[int, ...], float] = defaultdict(float)
    for kind, of_ranks in kinds.items():
        counts = {*map(len, of_ranks.values())}
        if len(of_ranks) == (kind.size or len(ranks)) and len(counts) == 1:
            last = np.max([events["start"] for events in of_ranks.values()], axis=0)
            clock_excess[tuple(of_ranks)] += _left_early(kind, of_ranks, last)
            for rank, events in of_ranks.items():
                begun = np.clip(last, events["start"], events["end"])
                waiting[rank].append(times_of(events))
                transfer[rank].append(np.column_stack([begun, events["end"]]))
        elif kind.size or not all(kind.step in trace.steps for trace in ranks.values()):
            unknown |= {(rank, kind.step) for rank in of_ranks}
    for members, excess in clock_excess.items():
        if excess > 0:
            unknown |= {(rank, number) for rank in members for number in ranks[rank].steps}
    phases = {}
    for rank in ranks:
        moving = merge(np.concatenate(transfer[rank]))
        phases[rank] = difference(merge(np.concatenate(waiting[rank])), moving), moving
    return phases, unknown


def _left_early(
    kind: "_CollectiveKey", of_ranks: Mapping[int, EventTable], last: NDArray[np.float64]
) -> float:
    """Return for how long ranks left collectives before the last rank began them, beyond the
    accepted difference of clocks.

    Args:
        last: time at which the last rank began each collective.
    """
    library, _, operation = kind.name.rpartition(":")
    sender = operation.removeprefix("from ")
    # a collective by copies ends on a rank as soon as that rank has its data
    synchronises = operation in _SYNCHRONISING and library != "collective"
    if sender == operation and not synchronises:
        return 0.0
    left = [events["end"] for rank, events in of_ranks.items() if str(rank) != sender]
    lasting = np.mean([events["end"] - events["start"] for events in of_ranks.values()], axis=0)
    return float(np.sum(np.maximum(0, last - np.min(left, axis=0)) - _CLOCK_TOLERANCE * lasting))


class _CollectiveKey(NamedTuple):
    """Key of collectives that are matched in their order."""

    step: int
    name: str
    unit: str
    group: Group
    size: int
    """Number of ranks that take part; 0: unknown."""


def _by_kind(rank: int, trace: Trace, ranks: Sequence[int]) -> dict[_CollectiveKey, EventTable]:
    """Return the collectives of a rank that began in a step.

    Args:
        ranks: ranks of the job.
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
    """Return the key of the collectives with which a collective is matched."""
    library, _, operation = name.rpartition(":")
    if operation not in ("send", "recv"):
        return _CollectiveKey(step, name, unit, group, group.size)
    pair = group.ranks if group.size else tuple(ranks)
    if len(pair) == 2 and rank in pair:
        sender = rank if operation == "send" else sum(pair) - rank
        return _CollectiveKey(step, f"{library}:from {sender}", unit, group, 2)
    # among more than two ranks the record does not name the receiver, so the message has no match
    size = -1 if group.size else 0
    return _CollectiveKey(step, name, unit, group, size)
