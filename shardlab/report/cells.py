"""How a column of a table is described, and how the cells of a run are written."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardlab.report.numbers import figure, fixed, optional, plus_minus

Row = dict[str, Any]
"""a row of `aggregate.comparison`, with `run` and `is_baseline`"""
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    title: str
    unit: str
    cell: Cell
    meaning: str
    numeric: bool = True

    @property
    def heading(self) -> str:
        """Title and unit in one line."""
        return f"{self.title}, {self.unit}" if self.unit else self.title


def plain(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """A measure that every run has."""
    return lambda row: figure(row[name] * scale, digits)


def where_known(name: str, digits: int = 3, scale: float = 1) -> Cell:
    """A measure that not every run has."""
    return lambda row: optional(row[name] * scale, digits)


def spread(name: str, digits: int = 3) -> Cell:
    """A measure with its standard deviation over seeds."""
    return lambda row: plus_minus(row[name], row[f"{name}_sd"], digits)


def share(name: str) -> Cell:
    """A share between 0 and 1, in percent."""
    return lambda row: fixed(100 * row[name], 1)


def words(name: str) -> Cell:
    """A text as it is."""
    return lambda row: str(row[name])


MB = 1e-6
KB = 1e-3

RUN = Column("run", "", words("run"), "name of the strategy in params.yaml", False)
