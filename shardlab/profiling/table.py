"""Breakdown of a job as text and as a page: a line per rank, the kinds of communication and of
copies, and a conclusion in one sentence."""

import csv
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from shardlab.core.errors import shorten
from shardlab.core.files import atomic
from shardlab.profiling.breakdown import StepTimes, mean_known, means_by_kind
from shardlab.profiling.job import JobBreakdown

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
"""Rows of a table, the headings first."""


def write_rows(path: Path, steps: Sequence[StepTimes]) -> None:
    """Write one row per step and rank as CSV, with times by operation and by unit as JSON text."""
    rows = [
        {name: json.dumps(v, sort_keys=True) if "_by_" in name else v for name, v in fields}
        for fields in (vars(step).items() for step in steps)
    ]
    with atomic(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def render(breakdown: JobBreakdown) -> Iterator[str]:
    """Yield the lines of the breakdown: means over the steps of each rank, in milliseconds.

    They hold printable characters only, even where names in a trace do not.
    """
    yield _CAPTION
    for i, rows in enumerate(_tables(breakdown)):
        if i:
            yield ""
        yield from _aligned(rows)
    if breakdown.notes:
        yield ""
    for note in breakdown.notes:
        yield shorten(note)


def page(breakdown: JobBreakdown) -> str:
    """Return the breakdown as one HTML page with the conclusion as heading; text from traces is
    escaped."""
    return _PAGE.format(
        title=escape(conclude(breakdown)),
        caption=_CAPTION,
        tables="\n".join(map(_html, _tables(breakdown))),
        notes="".join(f"<li>{escape(shorten(note))}" for note in breakdown.notes),
    )


def conclude(breakdown: JobBreakdown) -> str:
    """Return one sentence with the share of a step in exposed communication, and the largest
    speedup that hiding all of it can give."""
    step, comm, exposed = (
        sum(getattr(step, name) for step in breakdown.steps)
        for name in ("step_ms", "comm_ms", "exposed_comm_ms")
    )
    if not comm:
        return "There is no communication in these traces."
    share = exposed / step
    if share < 0.005:
        return (
            f"Communication is hidden: {100 * comm / step:.0f} % of the step, none of it exposed."
        )
    gain = f"; hiding it all gives at most {1 / (1 - share):.2f} {_FACTOR}" if share < 1 else ""
    operations = _main_operations(breakdown)
    return f"{100 * share:.0f} % of the step is exposed communication, mostly {operations}{gain}"


def _main_operations(breakdown: JobBreakdown) -> str:
    """Return the fewest operations with more than half of the exposed communication."""
    times = means_by_kind(step.exposed_comm_ms_by_op for step in breakdown.steps)
    names, total = [], 0.0
    for name in sorted(times, key=lambda name: -times[name]):
        names.append(shorten(name.rpartition(":")[2]))
        total += times[name]
        if total > sum(times.values()) / 2:
            break
    return " and ".join(names)


def _tables(breakdown: JobBreakdown) -> Iterator[_Rows]:
    headings = ["rank", "steps", "step", *(f"{part}, %" for part in _PARTS), *_TIMES, "overlap, %"]
    ranks = sorted({step.rank for step in breakdown.steps})
    yield [headings, *(_of_rank([s for s in breakdown.steps if s.rank == rank]) for rank in ranks)]
    communication, exposed = (
        means_by_kind(getattr(step, name) for step in breakdown.steps) for name in _COMMUNICATION
    )
    if communication:
        lines = [
            [shorten(kind), _text(mean), _text(exposed.get(kind, 0.0))]
            for kind, mean in communication.items()
        ]
        yield [["communication", "ms", "exposed"], *lines]
    if copies := means_by_kind(step.copy_ms_by_kind for step in breakdown.steps):
        yield [["copies", "ms"], *([shorten(kind), _text(mean)] for kind, mean in copies.items())]


def _of_rank(steps: Sequence[StepTimes]) -> list[str]:
    # each mean is over the steps in which the time is not None
    means = {
        name: mean_known(getattr(step, f"{name.replace(' ', '_')}_ms") for step in steps)
        for name in ("step", *_PARTS, *_TIMES)
    }
    return [
        str(steps[0].rank),
        str(len(steps)),
        _text(means["step"]),
        *(_text(100 * _share(means[part], means["step"]), 1) for part in _PARTS),
        *(_text(means[name]) for name in _TIMES),
        _text(100 * (1 - _share(means["exposed comm"], means["comm"])), 1),
    ]


def _share(part: float, total: float) -> float:
    return part / total if total else math.nan


def _text(number: float, digits: int = 3) -> str:
    return UNKNOWN if math.isnan(number) else f"{number:.{digits}f}"


def _html(rows: _Rows) -> str:
    headings, *body_rows = ([escape(cell) for cell in row] for row in rows)
    head = "".join(f"<th>{cell}" for cell in headings)
    body = "\n".join("<tr>" + "".join(f"<td>{cell}" for cell in row) for row in body_rows)
    return f"<div><table>\n<tr>{head}\n{body}\n</table></div>"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the rows with padded cells: the first column aligned left, numbers aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *numbers in rows:
        padded = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        yield "  ".join([first.ljust(widths[0]), *padded]).rstrip()
