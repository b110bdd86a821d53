"""Sections of the report: the one form that the page and tables.md render."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib.figure

from shardlab.report.tables import Table, escape


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
