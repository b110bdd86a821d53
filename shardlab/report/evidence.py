"""Evidence of a report, and what is computed from it once for all sections."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from shardlab.config.run_record import Record
from shardlab.config.schema import Quality
from shardlab.config.timing_record import TimedRun
from shardlab.forecast.results import ForecastDocument
from shardlab.report.aggregate import comparison, seed_warning
from shardlab.report.tables import Column, Section, Table, make_table
from shardlab.report.timings import crossovers, timing_table
from shardlab.search.history import History


@dataclass(frozen=True)
class Evidence:
    """Everything that a report is made from."""

    records: list[Record]
    """of every run and seed, in the order of the runs"""
    baseline: str
    losses: dict[str, dict[int, pd.Series]]
    """training loss by step, of each run and seed"""
    history: History
    source: dict[str, Any]
    statistics: dict[str, Any]
    """what the data stages say of the corpus; shown as it is"""
    timed: list[TimedRun]
    """of every timing"""
    comparison: str
    """name of the timing of all runs whose step times are compared"""
    quality: Quality
    predicted: ForecastDocument
    crashed: Sequence[str] = ()
    """which runs have no records, or are not in a timing, as their ranks failed; one text each"""

    @property
    def runs(self) -> list[str]:
        """Names of the runs."""
        return list(dict.fromkeys(record.run for record in self.records))

    @cached_property
    def timing_rows(self) -> pd.DataFrame:
        """One row per timing and run: `timings.timing_table`."""
        return timing_table(self.timed, self.baseline)

    @property
    def steps(self) -> pd.DataFrame:
        """Rows of the timing whose step times are compared."""
        return self.timing_rows[self.timing_rows["timing"] == self.comparison]

    @property
    def crossovers(self) -> list[pd.DataFrame]:
        """Rows of timings that differ in the rate of the link alone."""
        return crossovers(self.timing_rows)

    @cached_property
    def compared(self) -> pd.DataFrame:
        """One row per run: `aggregate.comparison`."""
        return comparison(self.records, self.steps, self.baseline)

    @property
    def crash_warning(self) -> str | None:
        """Sentence that names what crashed, which stands above all others."""
        return f"Crashed, and left out: {'; '.join(self.crashed)}." if self.crashed else None

    def run_table(self, title: str, columns: Sequence[Column]) -> Table:
        """Return a table with a row per run of `compared`, and the warning of too few seeds."""
        rows = self.compared.reset_index().to_dict("records")
        warning = seed_warning(self.records)
        return make_table(title, columns, rows, self.baseline, warning=warning)

    def timing_table(self, title: str, columns: Sequence[Column], rows: pd.DataFrame) -> Table:
        """Return a table with a line for each of `rows`, a selection of `timing_rows`."""
        return make_table(title, columns, rows.to_dict("records"), self.baseline)


Builder = Callable[[Evidence], Section | None]
"""builder of a section; returns None where the evidence has nothing for it"""


def section_of_runs(title: str, columns: Sequence[Column]) -> Callable[[Evidence], Section]:
    """Return the builder of a section that is one table with a row per run."""
    return lambda evidence: Section(title, tables=[evidence.run_table(title, columns)])
