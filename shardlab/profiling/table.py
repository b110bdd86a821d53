"""Breakdown of a job as text and as a page: a line per rank, then the kinds of communication and of
copies, and what follows from them in a sentence."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import pandas as pd

from shardlab.core.errors import shorten
from shardlab.core.files import atomic
from shardlab.profiling.breakdown import StepTimes, means_by_kind
from shardlab.profiling.job import Job

_PARTS = ["compute", "exposed comm", "exposed copy", "idle"]
_TIMES = ["comm", "comm skew", "copy", "forward", "backward", "update", "optimizer"]
_COMMUNICATION = ["comm_ms_by_op", "exposed_comm_ms_by_op"]
UNKNOWN, _FACTOR = "?", "\N{MULTIPLICATION SIGN}"
_CAPTION = "Times of a step in ms, means over steps; parts of it in %"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }}
body {{ max-width: 1180px; margin: 1.5rem auto; padding: 0 1rem; }}
div {{ overflow-x: auto; margin: 1.5rem 0; }}
table {{ border-collapse: collapse; font-size: .875rem; }}
th, td {{ border-bottom: 1px solid #8886; padding: .3rem .6rem; text-align: right; }}
:is(th, td):first-child {{ text-align: left; }}
</style>
<h1>{title}</h1>
<p>{caption}</p>
{tables}
<ul>{notes}</ul>
</html>
"""
_Rows = list[list[str]]
"""of a table, its headings first"""


def write_rows(path: Path, steps: Sequence[StepTimes]) -> None:
    """Write one row per step and rank as CSV; times by operation and by unit as JSON text."""
    table = pd.DataFrame([vars(step) for step in steps])
    for name in table.filter(like="_by_"):
        table[name] = [json.dumps(times, sort_keys=True) for times in table[name]]
    with atomic(path) as temporary:
        table.to_csv(temporary, index=False)


def render(job: Job) -> Iterator[str]:
    """Yield the lines of the breakdown: means over the steps of each rank, milliseconds.

    Nothing in them but printable characters, whatever a trace says.
    """
    yield _CAPTION
    for i, rows in enumerate(_tables(job)):
        if i:
            yield ""
        yield from _aligned(rows)
    if job.notes:
        yield ""
    for note in job.notes:
        yield shorten(note)


def page(job: Job) -> str:
    """Return the breakdown as one HTML page, whose heading is the conclusion; every text of a trace
    is escaped."""
    with pd.option_context("display.max_colwidth", None):
        tables = [
            pd.DataFrame(rows, columns=headings).to_html(index=False, border=0)
            for headings, *rows in _tables(job)
        ]
    return _PAGE.format(
        title=escape(conclude(job)),
        caption=_CAPTION,
        tables="\n".join(f"<div>{table}</div>" for table in tables),
        notes="".join(f"<li>{escape(shorten(note))}" for note in job.notes),
    )


def conclude(job: Job) -> str:
    """Return in a sentence which share of a step is exposed communication, and the largest speedup
    that hiding all of it can give."""
    steps = pd.DataFrame([vars(step) for step in job.steps])
    step, comm, exposed = (
        float(steps[name].sum()) for name in ("step_ms", "comm_ms", "exposed_comm_ms")
    )
    if not comm:
        return "There is no communication in these traces."
    share = exposed / step
    if share < 0.005:
        return (
            f"Communication is hidden: {100 * comm / step:.0f} % of the step, none of it exposed."
        )
    gain = f"; hiding it all gives at most {1 / (1 - share):.2f} {_FACTOR}" if share < 1 else ""
    most = f"{100 * share:.0f} % of the step is exposed communication, mostly {_most(job)}"
    return f"{most}{gain}"


def _most(job: Job) -> str:
    """Return the fewest operations with more than half of the exposed communication."""
    times = means_by_kind(step.exposed_comm_ms_by_op for step in job.steps)
    names, known = [], 0.0
    for name in sorted(times, key=lambda name: -times[name]):
        names.append(shorten(name.rpartition(":")[2]))
        known += times[name]
        if known > sum(times.values()) / 2:
            break
    return " and ".join(names)


def _tables(job: Job) -> Iterator[_Rows]:
    yield _of_ranks(job)
    everything, exposed = (
        means_by_kind(getattr(step, name) for step in job.steps) for name in _COMMUNICATION
    )
    if everything:
        lines = [
            [shorten(kind), _text(mean), _text(exposed.get(kind, 0.0))]
            for kind, mean in everything.items()
        ]
        yield [["communication", "ms", "exposed"], *lines]
    if copies := means_by_kind(step.copy_ms_by_kind for step in job.steps):
        yield [["copies", "ms"], *([shorten(kind), _text(mean)] for kind, mean in copies.items())]


def _of_ranks(job: Job) -> _Rows:
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
    return [headings, *rows]


def _text(number: float, places: int = 3) -> str:
    return UNKNOWN if pd.isna(number) else f"{number:.{places}f}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Pad cells to columns: the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *others in rows:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *padded]).rstrip()
