"""Breakdown of the traces of a job, whoever wrote them: any ranks, labelled or not."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import NamedTuple

from shardlab.core.errors import UserError
from shardlab.profiling.breakdown import StepTimes, step_times
from shardlab.profiling.events import Events, groups, list_unread, read_events
from shardlab.profiling.trace import Trace, traces_of
from shardlab.profiling.trace_file import is_trace, refusing
from shardlab.profiling.unlabelled import infer

_APART_US = 3.6e9
"""between the first events of two ranks whose clocks are taken for one"""


@dataclass(frozen=True)
class Job:
    """Steps of all ranks, and what was inferred or is unknown of them."""

    steps: list[StepTimes]
    notes: list[str]


def break_down(paths: Sequence[str | Path]) -> Job:
    """Break every step of every rank down.

    Args:
        paths: traces of one rank or merged ones, or folders that hold some, in any order.

    Raises:
        UserError: a trace is missing, incomplete, or one without events; a folder holds none, or
            those of several jobs.
    """
    given = {*map(Path, paths)}
    found = _traces_in(paths)
    files = {path: read_events(path) for path in found}
    parts = _parts([(path, files[path]) for path in found])
    for number, of_number in groupby(parts, key=lambda part: part.number):
        first, *others = of_number
        for part in others:
            if part.path not in given and first.path.parent != part.path.parent:
                where = f"rank {number} is in {first.path}, too"
                raise UserError(f"{part.path}: {where}: give the folder of one job")
    steps: list[StepTimes] = []
    notes: dict[str, list[int]] = defaultdict(list)
    size = max(events.world_size for events in files.values())
    for cycle in range(1 + max(part.cycle for part in parts)):
        steps += _of_cycle([part for part in parts if part.cycle == cycle], files, size, notes)
    if not steps:
        raise UserError(f"{found[0]}: no step: trace at least one step of the training")
    ranks = {part.rank for part in parts}
    steps.sort(key=lambda step: step.rank)
    return Job(steps, [f"{_names(of, ranks)}: {note}" for note, of in notes.items()])


class _Part(NamedTuple):
    """Trace of a rank in a file."""

    number: int
    """of the rank, as the file says"""
    start_us: float
    end_us: float
    steps: frozenset[str]
    path: Path
    rank: int = 0
    """its number in the job, where several files say the same one"""
    cycle: int = 0
    """of a profiler's schedule, which writes a file in each"""


def _parts(files: Sequence[tuple[Path, Events]]) -> list[_Part]:
    """Return the traces of each rank in order of time.

    A later one with other steps is another cycle of the rank, any other one is that of a rank
    whose number is not known.
    """
    parts: list[_Part] = []
    for path, events in files:
        with refusing(path):
            for number, table in groups(events.table, events.table["rank"].tolist()).items():
                zero = events.base_ns / 1000 + events.first_us
                start, end = zero + table["start"].min(), zero + table["end"].max()
                names = frozenset(table["name"][table["role"] == "step"])
                parts.append(_Part(number, start, end, names, path))
    numbers = {part.number for part in parts}
    placed: list[_Part] = []
    for number, of_number in groupby(sorted(parts, key=_order), key=lambda part: part.number):
        last, *others = of_number
        placed.append(last := last._replace(rank=number))
        for part in others:
            if part.steps and not part.steps & last.steps and part.start_us >= last.end_us:
                last = part._replace(
                    rank=number, cycle=last.cycle + 1, steps=part.steps | last.steps
                )
                placed.append(last)
            else:
                rank = next(free for free in count(number) if free not in numbers)
                numbers.add(rank)
                placed.append(part._replace(rank=rank))
    return placed


def _order(part: _Part) -> tuple[int, float]:
    return part.number, part.start_us


def _of_cycle(
    parts: Sequence[_Part],
    files: Mapping[Path, Events],
    size: int,
    notes: dict[str, list[int]],
) -> list[StepTimes]:
    """Return the steps of the ranks' traces of the same time, and add what is unknown of them."""
    first = files[parts[0].path]
    # from the first event of the first trace to that of each
    later = {
        part.path: (files[part.path].base_ns - first.base_ns) / 1000
        + files[part.path].first_us
        - first.first_us
        for part in parts
    }
    same_clock = all(abs(shift) < _APART_US for shift in later.values())
    ranks: dict[int, Trace] = {}
    for part in parts:
        path, rank = part.path, part.rank
        with refusing(path):
            trace = traces_of(files[path], later[path] if same_clock else 0.0)[part.number]
            ranks[rank], inferred = infer(trace)
        if rank != part.number:
            inferred = [f"rank: unknown: {path} is a second trace of rank {part.number}", *inferred]
        if files[path].unread:
            inferred = [*inferred, f"{list_unread(files[path].unread)} count as nothing"]
        for note in inferred:
            if rank not in notes[note]:
                notes[note].append(rank)
    with refusing(parts[0].path):
        steps = step_times(dict(sorted(ranks.items())))
    reason = _unknown_skew(ranks, size, same_clock)
    if reason:
        notes[f"skew, transfer: unknown: {reason}"] = sorted(ranks)
        return [replace(step, comm_skew_ms=None, comm_transfer_ms=None) for step in steps]
    unmatched = [step.rank for step in steps if step.comm_skew_ms is None]
    if unmatched:
        note = "skew, transfer: unknown in steps whose messages nothing on the other ranks matches"
        notes[note] = sorted({*unmatched, *notes[note]})
    return steps


def _traces_in(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files, and all traces below folders."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*.json*")) if is_trace(file)]
            if not inside:
                raise UserError(
                    f"{path}: no trace of torch.profiler (*.json, *.json.gz) in it: write one with "
                    "torch.profiler.profile(...).export_chrome_trace('rank0.json')"
                )
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            raise UserError(f"{path}: no such file or folder: give traces of torch.profiler")
    return found


def _unknown_skew(ranks: Mapping[int, Trace], size: int, same_clock: bool) -> str | None:
    """Return why waits for other ranks cannot be separated from transfers; None if they can."""
    if not any(len(trace.collectives) for trace in ranks.values()):
        return None
    if len(ranks) < (size or 2):
        return f"{len(ranks)} of {size or 'an unknown number of'} ranks given"
    return None if same_clock else "the clocks of the traces are more than an hour apart"


def _names(numbers: Sequence[int], ranks: Collection[int]) -> str:
    if len(numbers) == len(ranks) > 1:
        return "all ranks"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
