"""Breakdown of the traces of a job, whoever wrote them: any ranks, labelled or not."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.profiling.breakdown import StepTimes, step_times
from shardlab.profiling.events import list_unread, read_events
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
    first = files[found[0]]
    # from the first event of the first trace to that of each
    later = {
        path: (events.base_ns - first.base_ns) / 1000 + events.first_us - first.first_us
        for path, events in files.items()
    }
    same_clock = all(abs(shift) < _APART_US for shift in later.values())
    ranks: dict[int, Trace] = {}
    first_of: dict[int, Path] = {}
    notes: dict[str, list[int]] = defaultdict(list)
    for path in found:
        with refusing(path):
            for number, trace in traces_of(files[path], later[path] if same_clock else 0.0).items():
                rank = next(free for free in count(number) if free not in ranks)
                other = first_of.setdefault(number, path)
                if path not in given and other.parent != path.parent:
                    raise UserError(
                        f"{path}: rank {number} is in {other}, too: give the folder of one job"
                    )
                if rank != number:
                    note = f"rank: unknown: {path} is a second trace of rank {number}"
                    notes[note].append(rank)
                ranks[rank], inferred = infer(trace)
                for note in inferred:
                    notes[note].append(rank)
                if files[path].unread:
                    note = f"{list_unread(files[path].unread)} count as nothing"
                    notes[note].append(rank)
    with refusing(found[0]):
        steps = step_times(dict(sorted(ranks.items())))
    size = max(events.world_size for events in files.values())
    reason = _unknown_skew(ranks, size, same_clock)
    if reason:
        notes[f"skew, transfer: unknown: {reason}"] = sorted(ranks)
        steps = [replace(step, comm_skew_ms=None, comm_transfer_ms=None) for step in steps]
    if not steps:
        raise UserError(f"{found[0]}: no step: trace at least one step of the training")
    return Job(steps, [f"{_names(of, ranks)}: {note}" for note, of in notes.items()])


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


def _names(numbers: Sequence[int], ranks: Mapping[int, Trace]) -> str:
    if len(numbers) == len(ranks) > 1:
        return "all ranks"
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
