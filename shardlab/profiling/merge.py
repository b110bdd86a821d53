"""Merge of all ranks' traces into one Chrome trace for Perfetto and chrome://tracing.

Every rank becomes one process named `rank R`, and one more for each of its devices. Times get a
common base time. The header keeps the profiler's information on the job (`distributedInfo`, by
rank) and `ranks`, the rank of each process id.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.files import atomic
from shardlab.profiling.trace_file import TraceEvent, load_trace, write_trace

_FLOWS = ("s", "t", "f")


def merge_traces(paths: Sequence[str | Path], output: str | Path) -> None:
    """Merge the traces of all ranks into one file.

    Args:
        paths: one trace of torch.profiler per rank, in rank order.
        output: path of the merged trace, compressed.

    Raises:
        UserError: a trace is incomplete, or is of another rank.
    """
    headers, processes = [], []
    first = 0
    for path in paths:
        header, events = load_trace(path)
        # of timed events only: metadata also names words and other processes as process ids
        timed = (event.get("pid") for event in events if event["ph"] != "M")
        pids = sorted({pid for pid in timed if isinstance(pid, int)})
        # every process or device of a rank gets a process id that is unique in the job
        processes.append({pid: first + i for i, pid in enumerate(pids)})
        headers.append(header)
        first += len(pids)
    bases = [header.get("baseTimeNanoseconds", 0) for header in headers]
    jobs = [header.get("distributedInfo", {}) for header in headers]
    for rank, (path, job) in enumerate(zip(paths, jobs, strict=True)):
        if job.get("rank", rank) != rank:
            raise UserError(f"{path}: is the trace of rank {job['rank']}, not {rank}: order them")
    header = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": min(bases, default=0),
        "ranks": {pid: rank for rank, pids in enumerate(processes) for pid in pids.values()},
        "distributedInfo": {rank: job for rank, job in enumerate(jobs) if job},
    }
    with atomic(output) as temporary:
        write_trace(temporary, header, _events(paths, bases, processes))


def _events(
    paths: Sequence[str | Path], bases: Sequence[int], processes: Sequence[dict[int, int]]
) -> Iterator[TraceEvent]:
    for rank, (path, base, pids) in enumerate(zip(paths, bases, processes, strict=True)):
        shift_us = (base - min(bases)) / 1000
        for event in load_trace(path).events:
            if event.get("pid") in pids:
                yield _renumber(event, rank, len(paths), pids, shift_us)


def _renumber(
    event: TraceEvent, rank: int, ranks: int, pids: dict[int, int], shift_us: float
) -> TraceEvent:
    """Renumber the process of an event, and shift its time; changes the event."""
    event["pid"] = pids[event["pid"]]
    if "ts" in event:
        event["ts"] += shift_us
    if event["ph"] in _FLOWS:
        # flow arrows are matched by number over the whole file
        event["id"] = event["id"] * ranks + rank
    if event["ph"] == "M" and event["name"] == "process_name":
        event["args"] = {"name": f"rank {rank}"}
    if event["ph"] == "M" and event["name"] == "process_sort_index":
        event["args"] = {"sort_index": event["pid"]}
    return event
