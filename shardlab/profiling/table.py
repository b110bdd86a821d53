"""Breakdown of a job as text: a line per rank, then the kinds of communication and of copies."""

import statistics
from collections.abc import Iterable, Iterator, Sequence

from shardlab.core.errors import shorten
from shardlab.profiling.breakdown import StepTimes
from shardlab.profiling.job import Job

_COLUMNS = ("compute", "exposed_comm", "exposed_copy", "idle")
"""parts of the step"""
_TIMES = ("comm", "comm_skew", "copy", "forward", "backward", "update", "optimizer")
_BY = {"communication": "comm_ms_by_op", "copies": "copy_ms_by_kind"}
UNKNOWN = "?"


def render(job: Job) -> Iterator[str]:
    """Yield the lines of the breakdown: means over the steps of each rank, milliseconds.

    Nothing in them but printable characters, whatever a trace says.
    """
    ranks = sorted({step.rank for step in job.steps})
    by_rank = [[step for step in job.steps if step.rank == rank] for rank in ranks]
    headings = ["rank", "steps", "step", *(f"{n.replace('_', ' ')}, %" for n in _COLUMNS)]
    headings += [*(name.replace("_", " ") for name in _TIMES), "overlap, %"]
    yield "Times of a step in ms, means over steps; parts of it in %"
    yield from _aligned([headings, *(_row(steps) for steps in by_rank)])
    for title, name in _BY.items():
        kinds = sorted({kind for step in job.steps for kind in getattr(step, name)})
        if kinds:
            means = [_mean(getattr(s, name).get(kind, 0.0) for s in job.steps) for kind in kinds]
            yield ""
            yield from _aligned(
                [[title, "ms"], *([k, m] for k, m in zip(kinds, means, strict=True))]
            )
    if job.notes:
        yield ""
    for note in job.notes:
        yield shorten(note)


def _row(steps: Sequence[StepTimes]) -> list[str]:
    whole = statistics.fmean(step.step_ms for step in steps)
    comm, exposed = (
        statistics.fmean(getattr(step, name) for step in steps)
        for name in ("comm_ms", "exposed_comm_ms")
    )
    parts = [statistics.fmean(getattr(step, f"{name}_ms") for step in steps) for name in _COLUMNS]
    return [
        str(steps[0].rank),
        str(len(steps)),
        f"{whole:.3f}",
        *(f"{100 * part / whole:.1f}" for part in parts),
        *(_mean(getattr(step, f"{name}_ms") for step in steps) for name in _TIMES),
        f"{100 * (1 - exposed / comm):.1f}" if comm else UNKNOWN,
    ]


def _mean(times: Iterable[float | None]) -> str:
    """Return the mean of those that are known."""
    known = [time for time in times if time is not None]
    return f"{statistics.fmean(known):.3f}" if known else UNKNOWN


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pad cells to columns: the first to the left, numbers to the right."""
    cells = [[shorten(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *padded]).rstrip()
