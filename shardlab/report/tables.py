"""Tables of text cells: columns with their definitions, cell helpers, Markdown.

Cell helpers read the column `name` of a row, a row of `aggregate.comparison` or of another table.
Those for numbers share one signature: `digits` significant digits of the value times `scale`.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardlab.report.numbers import (
    ABSENT,
    NOT_FINITE,
    figure,
    fixed,
    optional,
    plus_minus,
    within,
)

Row = dict[str, Any]
Cell = Callable[[Row], str]

MB = 1e-6
KB = 1e-3


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


def plain(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """Show a measure that every run has; NaN means that the run diverged."""
    return lambda row: figure(row[name] * scale, digits)


def where_known(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """Show a measure that not every run has; NaN is a dash."""
    return lambda row: optional(row[name] * scale, digits)


def spread(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """Show a measure ± its standard deviation, which is in the column `NAME_sd`."""
    return lambda row: plus_minus(row[name] * scale, row[f"{name}_sd"] * scale, digits)


def share(name: str, places: int = 1) -> Cell:
    """Show a fraction between 0 and 1 in percent with so many decimals; NaN is a dash."""

    def cell(row: Row) -> str:
        return ABSENT if math.isnan(row[name]) else fixed(100 * row[name], places)

    return cell


def interval(name: str, places: int = 2) -> Cell:
    """Show a ratio with the interval `NAME_low` to `NAME_high`; 1 alone for the reference."""

    def cell(row: Row) -> str:
        mean, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
        if math.isnan(mean):
            return ABSENT
        return "1" if mean == low == high == 1 else within(mean, low, high, places)

    return cell


def words(name: str) -> Cell:
    """Show a value as text."""
    return lambda row: str(row[name])


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
        """Explanation of the marks that the cells use."""
        cells = {cell for row in self.rows for cell in row}
        meanings = {ABSENT: "not applicable to this run", NOT_FINITE: "the run diverged"}
        return "; ".join(f"{mark}: {text}" for mark, text in meanings.items() if mark in cells)

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


def _fact(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else figure(value, 4)
