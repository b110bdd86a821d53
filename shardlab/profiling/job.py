"""Breakdown of the traces of a job, whoever wrote them: any ranks, labelled or not."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from shardlab.core.errors import UserError
from shardlab.profiling.breakdown import StepTimes, step_times
from shardlab.profiling.trace import Trace
from shardlab.profiling.trace_file import load_trace, refusing
from shardlab.profiling.trace_reader import read_trace
from shardlab.profiling.unlabelled import infer

_APART_US = 3.6e9
"""between the first events of two ranks whose clocks are taken for one"""


@dataclass(frozen=True)
class Job:
    """Steps of all ranks, and what was inferred or is unknown of them."""

    steps: list[StepTimes]
    notes: list[str]


class _Clock(NamedTuple):
    base: int
    """nanoseconds"""
    first: float
    """time of the first event, microseconds since the base"""
    ranks: int
    """of the job; 0 where the trace does not say"""


def break_down(paths: Sequence[str | Path]) -> Job:
    """Break every step of every rank down.

    Args:
        paths: traces of one rank or merged ones, in any order.

    Raises:
        UserError: a trace is missing, incomplete, or one without events.
    """
    for path in paths:
        if not Path(path).is_file():
            raise UserError(f"{path}: no such file: give traces of torch.profiler, or RUN")
    clocks = [_clock_of(path) for path in paths]
    shared = [clocks[0].first + (clocks[0].base - clock.base) / 1000 for clock in clocks]
    same_clock = all(
        abs(clock.first - origin) < _APART_US for clock, origin in zip(clocks, shared, strict=True)
    )
    ranks: dict[int, Trace] = {}
    notes: dict[str, list[int]] = defaultdict(list)
    for path, origin in zip(paths, shared, strict=True):
        for number, trace in read_trace(path, origin if same_clock else None).items():
            rank = next(free for free in count(number) if free not in ranks)
            if rank != number:
                notes[f"rank: unknown: {path} is a second trace of rank {number}"].append(rank)
            with refusing(path):
                ranks[rank], inferred = infer(trace)
            for note in inferred:
                notes[note].append(rank)
    with refusing(paths[0]):
        steps = step_times(dict(sorted(ranks.items())))
    reason = _unknown_skew(clocks, ranks, same_clock)
    if reason:
        notes[f"skew, transfer: unknown: {reason}"] = sorted(ranks)
        steps = [replace(step, comm_skew_ms=None, comm_transfer_ms=None) for step in steps]
    if not steps:
        raise UserError(f"{paths[0]}: no step: trace at least one step of the training")
    return Job(steps, [f"{_names(of, ranks)}: {note}" for note, of in notes.items()])


def _clock_of(path: str | Path) -> _Clock:
    with refusing(path):
        header, events = load_trace(path)
        first = next((float(e["ts"]) for e in events if e["ph"] == "X"), 0.0)
        return _Clock(int(header.get("baseTimeNanoseconds", 0)), first, _ranks_of(header))


def _ranks_of(header: Mapping[str, Any]) -> int:
    job = header.get("distributedInfo", {})
    # a merged trace holds that of each rank
    jobs = [job, *(value for value in job.values() if isinstance(value, dict))]
    return max(int(job.get("world_size", 0)) for job in jobs)


def _unknown_skew(
    clocks: Sequence[_Clock], ranks: Mapping[int, Trace], same_clock: bool
) -> str | None:
    """Return why waits for other ranks cannot be separated from transfers; None if they can."""
    if not any(len(trace.collectives.times) for trace in ranks.values()):
        return None
    size = max(clock.ranks for clock in clocks)
    if len(ranks) < (size or 2):
        return f"{len(ranks)} of {size or 'an unknown number of'} ranks given"
    return None if same_clock else "the clocks of the traces are more than an hour apart"


def _names(numbers: Sequence[int], ranks: Mapping[int, Trace]) -> str:
    if len(numbers) == len(ranks) > 1:
        return "all ranks"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
