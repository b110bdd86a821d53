"""Sections of the report, their tables of text cells and their figures, also as Markdown."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib.figure

from shardlab.config.contention import THRESHOLD
from shardlab.report.numbers import (
    ABSENT,
    DISTURBED,
    INFINITE,
    NOT_FINITE,
    Cell,
    Row,
    figure,
    optional,
    percent,
    words,
)

_MEANINGS = {
    ABSENT: "not applicable to this run",
    NOT_FINITE: "the run diverged",
    INFINITE: "beyond the largest number",
    DISTURBED: f"others used more than {percent(THRESHOLD, 0)} of its CPUs meanwhile",
}
"""of cells and headings, and of their last words"""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    unit: str
    cell: Cell
    meaning: str
    """definition, for the section Definitions; empty where the title says all"""
    numeric: bool = True

    @property
    def heading(self) -> str:
        """Title and unit in one line."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


RUN = Column("run", "", words("run"), "name of the strategy in params.yaml", False)


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    highlighted: Sequence[int] = ()
    """rows of the baseline"""
    layout: Literal["figures", "text", "facts"] = "figures"
    """figures: a row per run; text: cells that wrap; facts: name and value, without headings"""
    warning: str | None = None
    """shown with the table"""

    @property
    def note(self) -> str | None:
        """Explanation of the marks that the cells and headings use."""
        cells = {cell for row in self.rows for cell in row}
        cells |= {text for column in self.columns for text in (column.title, column.unit)}
        marks = cells | {cell.rpartition(" ")[2] for cell in cells}
        return "; ".join(f"{mark}: {text}" for mark, text in _MEANINGS.items() if mark in marks)

    def markdown(self) -> str:
        """Return a GitHub table; text cells are escaped."""
        headings, *rows = (
            [escape(cell) for cell in line]
            for line in ([column.heading for column in self.columns], *self.rows)
        )
        ruler = ["---:" if column.numeric else "---" for column in self.columns]
        return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ruler, *rows))


def escape(text: str) -> str:
    """Escape text to one line that Markdown shows as it is, without markup or HTML."""
    return re.sub(r"([\\`*_\[\]<>|~&])", r"\\\1", " ".join(text.split()))


def make_table(
    title: str, columns: Sequence[Column], rows: Iterable[Row], baseline: str = ""
) -> Table:
    """Return a table with a line for each row, which has a key `run`; the baseline stands out."""
    marked = [{**row, "is_baseline": row["run"] == baseline} for row in rows]
    return Table(
        title=title,
        columns=columns,
        rows=[[column.cell(row) for column in columns] for row in marked],
        highlighted=[number for number, row in enumerate(marked) if row["is_baseline"]],
    )


def text_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts."""
    columns = [Column(heading, "", lambda row: "", "", numeric=False) for heading in headings]
    return Table(title, columns, rows, layout="text")


def fact_table(title: str, facts: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and values."""
    columns = [Column(name, "", words(name), "", numeric=False) for name in ("name", "value")]
    return Table(title, columns, [list(fact) for fact in facts], layout="facts")


def facts(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Flatten a tree of plain values into names and values."""
    lines: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = " · ".join(filter(None, [path, key.replace("_", " ")]))
        if isinstance(value, dict):
            lines += facts(value, name)
        elif isinstance(value, list):
            lines.append((name, ", ".join(map(_fact, value)) or ABSENT))
        else:
            lines.append((name, _fact(value)))
    return lines


def by_run(title: str, unit: str, values: Mapping[str, float], meaning: str = "") -> Column:
    """Return a column with a number for each run; NaN is a dash."""
    return Column(title, unit, lambda row: optional(values[row["run"]]), meaning)


def _fact(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else figure(value, 4)


@dataclass(frozen=True)
class Figure:
    """A plot with its name, which is also the name of its files, and its caption."""

    name: str
    caption: str
    drawing: matplotlib.figure.Figure


@dataclass(frozen=True)
class Section:
    """A titled part of the report; its contents are shown in the order of the fields.

    Texts may come from a judge, a crash or a user: renderers escape all of them.
    """

    title: str
    sentences: Sequence[str] = ()
    """a paragraph each"""
    items: Sequence[str] = ()
    """a bulleted list"""
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    """small print on the tables"""
    sections: Sequence["Section"] = ()
    details: Sequence["Section"] = ()
    """subsections that the page shows folded"""

    @property
    def anchor(self) -> str:
        """Identifier on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def walk(self) -> Iterator["Section"]:
        """Yield the section and all below it, in the order of the page."""
        yield self
        for section in (*self.sections, *self.details):
            yield from section.walk()

    def markdown(self, level: int = 2) -> str:
        """Return the section as Markdown; `level` is that of its heading."""
        parts = [f"{'#' * level} {escape(self.title)}", *map(escape, self.sentences)]
        if self.items:
            parts.append("\n".join(f"- {escape(item)}" for item in self.items))
        parts += [f"![{escape(f.caption)}](plots/{f.name}.svg)" for f in self.figures]
        for table in self.tables:
            if table.title != self.title:
                parts.append(f"{'#' * (level + 1)} {escape(table.title)}")
            parts.append(table.markdown().rstrip("\n"))
            parts += [escape(text) for text in (table.warning, table.note) if text]
        parts += map(escape, self.notes)
        below = [each.markdown(level + 1) for each in (*self.sections, *self.details)]
        return "\n\n".join([*parts, *below])


def tables_of(sections: Sequence[Section]) -> list[Table]:
    """Return all tables of the sections, in the order of the page."""
    return [table for top in sections for section in top.walk() for table in section.tables]


def figures_of(sections: Sequence[Section]) -> list[Figure]:
    """Return all figures of the sections, in the order of the page."""
    return [figure for top in sections for section in top.walk() for figure in section.figures]
