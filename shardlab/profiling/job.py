"""Breakdown of the traces of a job: any traces of torch.profiler, any ranks, labelled or not."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardlab.core.errors import UserError
from shardlab.profiling.breakdown import StepTimes, step_times
from shardlab.profiling.events import Events, EventTable, groups, list_unread, read_events
from shardlab.profiling.trace import Trace, traces_of
from shardlab.profiling.trace_file import is_trace, refusing
from shardlab.profiling.unlabelled import infer


@dataclass(frozen=True)
class JobBreakdown:
    """Steps of all ranks, and notes on what was inferred or is unknown."""

    steps: list[StepTimes]
    notes: list[str]


def break_down(paths: Sequence[str | Path]) -> JobBreakdown:
    """Break every step of every rank down.

    Args:
        paths: traces of single ranks, merged traces, or folders that hold traces, in any order.

    Raises:
        UserError: a trace is missing, incomplete or without events; a folder holds no trace; two
            traces are of the same steps of one rank, or of several jobs.
    """
    files = {path: read_events(path) for path in _traces_in(paths)}
    size, named = _world_size(files), {Path(path).resolve() for path in paths}
    parts = _with_ranks(_distinct(_parts(files)), named)
    for part in parts:
        if size and part.rank >= size:
            raise UserError(
                f"{part.path}: rank {part.rank} of a job of {size} ranks, which are counted from "
                "0: leave out the traces of other jobs"
            )
    steps: list[StepTimes] = []
    notes: dict[str, list[int]] = defaultdict(list)
    for cycle in range(1 + max(part.cycle for part in parts)):
        steps += _of_cycle([part for part in parts if part.cycle == cycle], files, size, notes)
    if not steps:
        raise UserError(f"{parts[0].path}: no step: trace at least one step of the training")
    ranks = {part.rank for part in parts}
    steps.sort(key=lambda step: step.rank)
    return JobBreakdown(steps, [f"{_names(of, ranks)}: {note}" for note, of in notes.items()])


class _RankTrace(NamedTuple):
    """Trace of a rank in a file."""

    number: int
    """Rank by the file; 0 where the file does not say it."""
    numbered: bool
    """Whether the file says its rank."""
    process: str
    start_us: float
    end_us: float
    table: EventTable
    steps: frozenset[str]
    """Labelled steps of this cycle and of earlier cycles."""
    path: Path
    copies: tuple[Path, ...] = ()
    """Further files with the same events."""
    rank: int = 0
    """Rank in the job, counted where files do not say theirs."""
    cycle: int = 0
    """Cycle of the profiler's schedule, which writes one file per cycle."""


def _world_size(files: Mapping[Path, Events]) -> int:
    """Return the number of ranks of the job; 0 where no trace says it.

    Raises:
        UserError: traces say different numbers.
    """
    sizes: dict[int, Path] = {}
    for path, events in files.items():
        if events.world_size:
            sizes.setdefault(events.world_size, path)
    if len(sizes) > 1:
        (size, first), (other, path) = [*sizes.items()][:2]
        raise UserError(
            f"{path}: of a job of {other} ranks, {first} of one of {size}: give the traces of one"
        )
    return max(sizes, default=0)


def _parts(files: Mapping[Path, Events]) -> list[_RankTrace]:
    """Return the traces by rank, then traces that say their rank first, then by time."""
    parts: list[_RankTrace] = []
    for path, events in files.items():
        with refusing(path):
            for number, table in groups(events.table, events.table["rank"].tolist()).items():
                zero = events.base_ns / 1000 + events.first_us
                start, end = zero + table["start"].min(), zero + table["end"].max()
                names = frozenset(table["name"][table["role"] == "step"])
                identity = number, events.numbered, events.process
                parts.append(_RankTrace(*identity, start, end, table, names, path))
    return sorted(parts, key=lambda part: (part.number, not part.numbered, part.start_us))


def _distinct(parts: Sequence[_RankTrace]) -> list[_RankTrace]:
    """Return one trace of several with the same events; its `copies` name the further files."""
    distinct: list[_RankTrace] = []
    for part in parts:
        for index, first in enumerate(distinct):
            equal_start = (part.number, part.start_us) == (first.number, first.start_us)
            if equal_start and np.array_equal(part.table, first.table):
                distinct[index] = first._replace(copies=(*first.copies, part.path))
                break
        else:
            distinct.append(part)
    return distinct


def _with_ranks(parts: Sequence[_RankTrace], named: Collection[Path]) -> list[_RankTrace]:
    """Return the traces with their rank in the job and their cycle.

    A later trace of the same process is a further cycle of its rank. Any other further trace is of
    another rank where it does not say its rank.

    Args:
        named: paths that the user named, in place of a folder.

    Raises:
        UserError: a further trace says the rank, so it is of another run.
    """
    numbers = {part.number for part in parts}
    placed: list[_RankTrace] = []
    for number, of_number in groupby(parts, key=lambda part: part.number):
        last: dict[int, _RankTrace] = {}
        for part in of_number:
            rank = next((rank for rank, prior in last.items() if _continues(part, prior)), None)
            if rank is None and last:
                _refuse_second(part, last[number], named)
                rank = next(unused for unused in count(number) if unused not in numbers)
                numbers.add(rank)
            if rank in last:
                previous = last[rank]
                part = part._replace(cycle=previous.cycle + 1, steps=part.steps | previous.steps)
            rank = number if rank is None else rank
            last[rank] = part._replace(rank=rank)
            placed.append(last[rank])
    return placed


def _continues(part: _RankTrace, previous: _RankTrace) -> bool:
    """Return whether `part` is a later cycle of the rank of `previous`.

    Steps without labels may be the same steps, so a trace without labels must say its rank.
    """
    later = part.process == previous.process and part.start_us >= previous.end_us
    return later and not part.steps & previous.steps and bool(part.steps or part.numbered)


def _refuse_second(part: _RankTrace, first: _RankTrace, named: Collection[Path]) -> None:
    """Raise UserError for a second trace of a rank, unless it may be of another rank."""
    if part.numbered:
        raise UserError(
            f"{part.path}: rank {part.number} is also in {first.path}, and this is not a later "
            f"part of it (begun {(part.start_us - first.start_us) / 1e6:.4g} s after it): leave "
            "out the trace of another run"
        )
    if part.path.resolve() not in named and first.path.parent != part.path.parent:
        raise UserError(
            f"{part.path}: does not say its rank, like {first.path}: give the folder of one job, "
            "or name the file of each rank"
        )


def _of_cycle(
    parts: Sequence[_RankTrace],
    files: Mapping[Path, Events],
    size: int,
    notes: dict[str, list[int]],
) -> list[StepTimes]:
    """Return the steps of one cycle of all ranks, and add notes on what is unknown."""
    first = files[parts[0].path]
    # time from the first event of the first trace to the first event of each trace
    later = {
        part.path: (files[part.path].base_ns - first.base_ns) / 1000
        + files[part.path].first_us
        - first.first_us
        for part in parts
    }
    # traces that overlap in time were written with one clock
    same_clock = max(part.start_us for part in parts) < min(part.end_us for part in parts)
    ranks: dict[int, Trace] = {}
    for part in parts:
        path, rank = part.path, part.rank
        with refusing(path):
            trace = traces_of(files[path], later[path] if same_clock else 0.0)[part.number]
            ranks[rank], inferred = infer(trace)
        if rank != part.number:
            inferred = [f"rank: unknown: {path} does not say its rank", *inferred]
        if part.cycle and not part.steps:
            inferred = [f"steps: steps in {path} are taken as later steps of its run", *inferred]
        inferred += [f"{copy} is ignored: {path} has its events" for copy in part.copies]
        if files[path].unread:
            inferred = [*inferred, f"{list_unread(files[path].unread)} are ignored"]
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
        note = (
            "skew, transfer: unknown in steps with messages that match none on the other ranks, or "
            "none at the same time, as where the clocks of hosts differ"
        )
        notes[note] = sorted({*unmatched, *notes[note]})
    return steps


def _traces_in(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files and all traces below the folders, without repetitions."""
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*.json*")) if is_trace(file)]
            if not inside:
                raise UserError(
                    f"{path}: no trace of torch.profiler (*.json, *.json.gz) in it: write one with "
                    "torch.profiler.profile(...).export_chrome_trace('rank0.json')"
                )
            files += inside
        elif path.is_file():
            files.append(path)
        else:
            raise UserError(f"{path}: no such file or folder: give traces of torch.profiler")
    return [*{path.resolve(): path for path in files}.values()]


def _unknown_skew(ranks: Mapping[int, Trace], size: int, same_clock: bool) -> str | None:
    """Return why waits for other ranks cannot be separated from transfers; None if they can."""
    if not any(len(trace.collectives) for trace in ranks.values()):
        return None
    if len(ranks) < (size or 2):
        return f"{len(ranks)} of {size or 'an unknown number of'} ranks given"
    return None if same_clock else "the traces of the ranks do not overlap in time"


def _names(numbers: Sequence[int], ranks: Collection[int]) -> str:
    if len(numbers) == len(ranks) > 1:
        return "all ranks"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
