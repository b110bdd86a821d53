"""Tables of text cells, figures and sections; also as Markdown."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import matplotlib.figure

from shardlab.core.numbers import ABSENT, INFINITE, figure, percent, plus_minus, within
from shardlab.report.markdown import escape
from shardlab.results.contention import THRESHOLD

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Layout = Literal["figures", "text", "facts"]
"""figures: a row per run; text: cells that wrap; facts: name and value, without headings"""

_SCALES = {"MB": 1e-6, "kB": 1e-3, "%": 100.0}
"""by the first word of a unit: rows hold bytes, and fractions between 0 and 1"""
ONE_DEVICE = "one device alone"
"""row of a timing: what one device takes for the tokens of a step of all ranks"""
DISTURBED = "\N{DAGGER}"
PAUSED = "\N{DOUBLE DAGGER}"


def spread(name: str, digits: int = 3) -> Cell:
    """Show a measure ± its standard deviation, which is in the column `NAME_sd`."""
    return lambda row: plus_minus(row[name], row[f"{name}_sd"], digits)


def estimate(row: Row, name: str) -> tuple[float, float, float]:
    """Return a value of a row with the ends of its interval, `NAME_low` and `NAME_high`."""
    return row[name], row[f"{name}_low"], row[f"{name}_high"]


def interval(name: str, places: int = 2) -> Cell:
    """Show a ratio with the interval `NAME_low` to `NAME_high`; 1 alone for the reference."""

    def cell(row: Row) -> str:
        ratio, low, high = estimate(row, name)
        return "1" if ratio == low == high == 1 else within(ratio, low, high, places)

    return cell


def speed_up(name: str) -> Cell:
    """Show the inverse of a ratio of step times with its interval."""

    def cell(row: Row) -> str:
        mean, high, low = (1 / ratio for ratio in estimate(row, name))
        return "1" if mean == low == high == 1 else within(mean, low, high, 2)

    return cell


_MARKS = {
    ABSENT: "not applicable to this run, or not finite as the run diverged",
    INFINITE: "beyond the largest number",
    DISTURBED: f"others used more than {percent(THRESHOLD, 0)} of its CPUs meanwhile",
    PAUSED: "without steps of more than twice their median, in which the machine paused",
}
"""meanings of cells and headings, and of their last words"""


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    unit: str
    value: str | Cell
    """name of a value of the row, which is a text or a number, or function that formats a row"""
    meaning: str = ""
    """definition, for the section Definitions; empty where the title says all"""
    numeric: bool = True
    digits: int = 3
    """significant digits of a number"""
    extra: bool = False
    """folded on the page"""

    @property
    def heading(self) -> str:
        """Title and unit in one line."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def cell(self, row: Row) -> str:
        """Return the cell of a row; a dash where the number is NaN."""
        if callable(self.value):
            return self.value(row)
        value = row[self.value]
        scale = _SCALES.get(re.split("[/ ]", self.unit)[0], 1.0)
        return figure(value * scale, self.digits) if isinstance(value, float) else str(value)


RUN = Column(
    "run",
    "",
    "run",
    "name of the strategy in params.yaml, or found-by-… of a search",
    numeric=False,
)


@dataclass(frozen=True)
class Table:
    """A table of text cells."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    highlighted: Sequence[int] = ()
    """rows of the baseline"""
    pinned: Sequence[int] = ()
    """rows that are no strategies, which stay first however the table is sorted"""
    layout: Layout = "figures"
    warning: str | None = None
    """shown with the table"""

    @property
    def note(self) -> str:
        """Explanation of the marks that the cells and headings use."""
        texts = {cell for row in self.rows for cell in row}
        texts |= {text for column in self.columns for text in (column.title, column.unit)}
        marks = {word for text in texts for word in (text, *text.split(" "))}
        return "; ".join(f"{mark}: {meaning}" for mark, meaning in _MARKS.items() if mark in marks)

    def filled(self) -> "Table":
        """Return the table without columns that have no value in any row."""
        lines = zip(self.columns, *self.rows, strict=True)
        columns, *rows = zip(*(line for line in lines if {*line[1:]} != {ABSENT}), strict=True)
        return replace(self, columns=columns, rows=[*map(list, rows)])

    def markdown(self) -> str:
        """Return a GitHub table; text cells are escaped."""
        lines = [[column.heading for column in self.columns], *self.rows]
        headings, *rows = ([escape(cell) for cell in line] for line in lines)
        ruler = ["---:" if column.numeric else "---" for column in self.columns]
        return "".join(f"| {' | '.join(line)} |\n" for line in (headings, ruler, *rows))


def make_table(
    title: str,
    columns: Sequence[Column | str],
    rows: Iterable[Row | Sequence[str]],
    baseline: str = "",
    layout: Layout = "figures",
    warning: str | None = None,
) -> Table:
    """Return a table with a line for each row.

    Args:
        columns: a text is the heading of a column of texts.
        rows: values by name, which the columns show; or texts, one for each column.
        baseline: rows whose value `run` is this one stand out.
    """
    shown = [
        Column(column, "", "", numeric=False) if isinstance(column, str) else column
        for column in columns
    ]
    lines: list[list[str]] = []
    highlighted: list[int] = []
    pinned: list[int] = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            lines.append(list(row))
            continue
        is_baseline = row.get("run", "") == baseline
        lines.append([column.cell({**row, "is_baseline": is_baseline}) for column in shown])
        highlighted += [number] * is_baseline
        pinned += [number] * (row.get("run", "") == ONE_DEVICE)
    return Table(title, shown, lines, highlighted, pinned, layout, warning)


def facts_table(title: str, facts: Iterable[Sequence[str]]) -> Table:
    """Return a table of names and values."""
    return make_table(title, ["name", "value"], facts, layout="facts")


def flatten(tree: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    """Flatten a tree of plain values into names and values."""
    lines: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = " · ".join(filter(None, [path, key.replace("_", " ")]))
        if isinstance(value, dict):
            lines += flatten(value, name)
        else:
            values = value if isinstance(value, list) else [value]
            lines.append((name, ", ".join(map(_plain, values)) or ABSENT))
    return lines


def _plain(value: Any) -> str:
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

    @property
    def empty(self) -> bool:
        """Whether there was nothing to plot: it has files and is not shown."""
        return not self.drawing.axes


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
    folded: bool = False
    """on the page its title alone is shown until a reader opens it"""

    @property
    def anchor(self) -> str:
        """Identifier on the page."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    def walk(self) -> Iterator["Section"]:
        """Yield the section and all below it, in the order of the page."""
        yield self
        for section in self.sections:
            yield from section.walk()

    def markdown(self, level: int = 2) -> str:
        """Return the section as Markdown; `level` is that of its heading."""
        parts = [f"{'#' * level} {escape(self.title)}", *map(escape, self.sentences)]
        if self.items:
            parts.append("\n".join(f"- {escape(item)}" for item in self.items))
        parts += [
            f"![{escape(f.caption)}](plots/svg/{f.name}.svg)" for f in self.figures if not f.empty
        ]
        for table in self.tables:
            if not table.rows:
                continue
            if table.title != self.title:
                parts.append(f"{'#' * (level + 1)} {escape(table.title)}")
            parts.append(table.markdown().rstrip("\n"))
            parts += [escape(text) for text in (table.warning, table.note) if text]
        parts += map(escape, self.notes)
        parts += [below.markdown(level + 1) for below in self.sections]
        return "\n\n".join(parts)


def tables_of(sections: Sequence[Section]) -> list[Table]:
    """Return all tables of the sections, in the order of the page."""
    return [table for top in sections for section in top.walk() for table in section.tables]


def figures_of(sections: Sequence[Section]) -> list[Figure]:
    """Return all figures of the sections, in the order of the page."""
    return [figure for top in sections for section in top.walk() for figure in section.figures]
