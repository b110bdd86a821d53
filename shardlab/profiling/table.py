"""Breakdown of a job as text: a line per rank, then the kinds of communication and of copies."""

from collections.abc import Iterator, Sequence

import pandas as pd

from shardlab.core.errors import shorten
from shardlab.profiling.breakdown import means_by_kind
from shardlab.profiling.job import Job

_PARTS = ["compute", "exposed comm", "exposed copy", "idle"]
_TIMES = ["comm", "comm skew", "copy", "forward", "backward", "update", "optimizer"]
_BY = {"communication": "comm_ms_by_op", "copies": "copy_ms_by_kind"}
UNKNOWN = "?"


def render(job: Job) -> Iterator[str]:
    """Yield the lines of the breakdown: means over the steps of each rank, milliseconds.

    Nothing in them but printable characters, whatever a trace says.
    """
    steps = pd.DataFrame([vars(step) for step in job.steps]).drop(columns="step")
    steps = steps.rename(columns=lambda name: name.removesuffix("_ms").replace("_", " "))
    counts = steps.groupby("rank").size()
    # of the steps in which a time is known
    means = steps[["rank", "step", *_PARTS, *_TIMES]].astype(float).groupby("rank").mean()
    shares = means[_PARTS].div(means["step"], axis=0)
    shares["overlap"] = 1 - means["exposed comm"] / means["comm"].where(means["comm"] > 0)
    headings = ["rank", "steps", "step", *(f"{part}, %" for part in _PARTS), *_TIMES, "overlap, %"]
    rows = [
        [
            str(rank),
            str(counts[rank]),
            _text(times["step"]),
            *(_text(100 * share, 1) for share in shares.loc[rank, _PARTS]),
            *(_text(time) for time in times[_TIMES]),
            _text(100 * shares.loc[rank, "overlap"], 1),
        ]
        for rank, times in means.rename(index=int).iterrows()
    ]
    yield "Times of a step in ms, means over steps; parts of it in %"
    yield from _aligned([headings, *rows])
    for title, name in _BY.items():
        means_of_kinds = means_by_kind(getattr(step, name) for step in job.steps)
        if means_of_kinds:
            yield ""
            lines = [[kind, _text(mean)] for kind, mean in means_of_kinds.items()]
            yield from _aligned([[title, "ms"], *lines])
    if job.notes:
        yield ""
    for note in job.notes:
        yield shorten(note)


def _text(number: float, places: int = 3) -> str:
    return UNKNOWN if pd.isna(number) else f"{number:.{places}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pad cells to columns: the first to the left, numbers to the right."""
    cells = [[shorten(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *padded]).rstrip()
