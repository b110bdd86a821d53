"""Evidence of a report, and what is computed from it once for all sections."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from shardlab.choose.history import History
from shardlab.choose.records import Decision
from shardlab.predict.results import ForecastDocument
from shardlab.report.aggregate import comparison, seed_warning
from shardlab.report.loss_times import Comparison, compare_links
from shardlab.report.quality import quality_row, training_curve
from shardlab.report.settings import Quality
from shardlab.report.tables import ONE_DEVICE, Column, Section, Table, make_table
from shardlab.report.timings import ALIKE, crossovers, timing_table
from shardlab.report.tuned import Tuned
from shardlab.results.table import StrategyResults
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.results.train_result import TrainResult


def last_decisions(history: History, runs: Collection[str]) -> dict[str, Decision]:
    """Return the last decision of each search, by a name for the strategy that is held after it.

    Args:
        runs: names of runs, which are no names of such strategies.
    """
    last = {decision.search: decision for decision in history.rounds}
    names = {search: f"found-by-{search or 'search'}" for search in last}
    return {
        f"{name}-again" if name in runs else name: last[search] for search, name in names.items()
    }


def found_strategies(history: History, runs: Collection[str]) -> dict[str, StrategyResults]:
    """Return by name what searches hold within the memory limit and a round has trained.

    Args:
        runs: of `last_decisions`.
    """
    last = last_decisions(history, runs).items()
    held = {name: history.measured[decision.held] for name, decision in last if decision.fits}
    return {name: row for name, row in held.items() if row.trained and row.files is not None}


@dataclass(frozen=True)
class Evidence:
    """Everything that a report is made from."""

    records: list[TrainResult]
    """of every run and seed, in the order of the runs"""
    baseline: str
    losses: dict[str, dict[int, pd.Series]]
    """training loss by step, of each run and seed, and then of what searches found"""
    validation: dict[str, dict[int, pd.Series]]
    """validation loss by the number of steps done, likewise; empty without `train.validation`"""
    history: History
    source: dict[str, Any]
    statistics: dict[str, Any]
    """what the data stages say of the corpus; shown as it is"""
    timed: list[TimingResult]
    """of every timing"""
    turns: Mapping[str, str]
    """by name of a timing, the one that it took turns with: `schema.turns`"""
    comparison: str
    """name of the timing of all runs whose step times are compared"""
    quality: Quality
    tolerance: float
    """largest relative rise of perplexity of a strategy that is recommended"""
    is_searched: bool
    """whether a search may try strategies: `agent.budget` above 0"""
    predicted: ForecastDocument
    tuned: Tuned | None = None
    """what was tuned to reach one loss; None: nothing"""
    crashed: Sequence[str] = ()
    """which runs have no records, or are not in a timing, as their ranks failed; one text each"""
    lost: Collection[str] = ()
    """names of runs that failed in training, or in the timing that is compared"""

    @property
    def runs(self) -> list[str]:
        """Names of the runs."""
        return list(dict.fromkeys(record.run for record in self.records))

    @property
    def names(self) -> set[str]:
        """Names of the runs, and of what was timed alone."""
        return {*self.runs, *(run.run for run in self.timed)}

    @cached_property
    def found(self) -> dict[str, StrategyResults]:
        """Strategies that `found_strategies` returns."""
        return found_strategies(self.history, self.names)

    @cached_property
    def all_timing_rows(self) -> pd.DataFrame:
        """One row per timing and run: `timings.timing_table`."""
        return timing_table(self.timed, self.baseline, self.turns)

    @cached_property
    def timing_rows(self) -> pd.DataFrame:
        """Those whose steps have as many micro-batches as those of the training runs."""
        rows = self.all_timing_rows
        same = rows["accumulation"] == self.records[0].accumulation
        return rows[same].reset_index(drop=True)

    @property
    def steps(self) -> pd.DataFrame:
        """Rows of the timing whose step times are compared."""
        return self.timing_rows[self.timing_rows["timing"] == self.comparison]

    @property
    def crossovers(self) -> list[pd.DataFrame]:
        """Rows of timings that differ in the rate of the link alone."""
        return crossovers(self.timing_rows)

    @cached_property
    def main_timing(self) -> str:
        """Name of the timing that the page shows first: that of `comparison`; if this has no
        emulated link, that on the slowest one between as many ranks, as communication matters."""
        rows, first = self.timing_rows, self.steps.iloc[0]
        linked = rows[(rows["world_size"] == first["world_size"]) & rows["bits_per_second"].notna()]
        if linked.empty or not math.isnan(first["bits_per_second"]):
            return self.comparison
        return str(linked.loc[linked["bits_per_second"].idxmin(), "timing"])

    @property
    def main_steps(self) -> pd.DataFrame:
        """Its rows of `timing_rows`."""
        return self.timing_rows[self.timing_rows["timing"] == self.main_timing]

    @property
    def main_traces(self) -> pd.DataFrame:
        """Its rows, and those of the last race on its ranks and link of each strategy that was
        found."""
        size, link = self.main_steps[["world_size", "link"]].iloc[0]
        rows = [self.main_steps]
        for name, row in self.found.items():
            races = self.history.races.values()
            raced = [run for runs in races for run in runs if run.run == row.hash]
            if raced := [run for run in raced if is_on(run, size, link)]:
                rows.append(timing_table(raced[-1:], self.baseline).assign(run=name))
        return pd.concat(rows, ignore_index=True)

    @property
    def main_group(self) -> pd.DataFrame:
        """Rows of the timings that differ from this one in the rate of the link alone, slowest
        first."""
        rows = self.timing_rows.sort_values("bits_per_second", kind="stable", na_position="last")
        return rows[(rows[ALIKE] == self.main_steps[ALIKE].iloc[0]).all(axis=1)]

    @property
    def several(self) -> list[pd.DataFrame]:
        """Rows of each timing of several ranks, the main one first."""
        rows = self.timing_rows[self.timing_rows["world_size"] > 1]
        ordered = rows.sort_values([*ALIKE, "bits_per_second"], na_position="last")
        names = sorted(ordered["timing"].unique(), key=lambda name: name != self.main_timing)
        return [rows[rows["timing"] == name] for name in names]

    @cached_property
    def main_rows(self) -> list[dict[str, Any]]:
        """What the main timing and the training runs say of each run that has either; NaN where it
        has none. Bytes are of training where there was one, with its first steps. The row without
        communication is first, where there is one."""
        timed = self.main_steps.set_index("run")
        # bytes do not depend on the link
        others = timed.columns.difference(["bytes_wire"])
        trained = self.compared.drop(columns=others, errors="ignore")
        blank: dict[str, Any] = dict.fromkeys([*timed, *trained], math.nan)
        blank |= {"divergence": "", "paused": 0, "disturbed": False}
        left_out = [NO_COMMUNICATION, *self.lost]
        steps = timed.drop(left_out, errors="ignore").to_dict("index")
        facts = trained.to_dict("index")
        first = [run for run in steps if run == ONE_DEVICE]
        runs = dict.fromkeys([*first, *facts, *steps])
        return [{**blank, **steps.get(r, {}), **facts.get(r, {}), "run": r} for r in runs]

    @cached_property
    def compared(self) -> pd.DataFrame:
        """One row per run: `aggregate.comparison`."""
        return comparison(self.records, self.steps, self.baseline)

    @cached_property
    def by_loss(self) -> list[Comparison]:
        """Methods compared on each link by the time to one loss; empty where nothing was tuned."""
        return [] if self.tuned is None else compare_links(self.timed, self.turns, self.tuned)

    @property
    def crash_warning(self) -> str | None:
        """Sentence that names what crashed, which stands above all others."""
        return f"Crashed, and left out: {'; '.join(self.crashed)}." if self.crashed else None

    @cached_property
    def all_records(self) -> list[TrainResult]:
        """The records, and those of the strategies that were found, by the names of these."""
        named = [
            record.model_copy(update={"run": name})
            for name, row in self.found.items()
            for record in row.trained
        ]
        return [*self.records, *named]

    @cached_property
    def trained(self) -> pd.DataFrame:
        """The rows of `compared`, and those of the strategies that were found."""
        return comparison(self.all_records, self.steps, self.baseline)

    @cached_property
    def curves(self) -> dict[str, dict[str, dict[int, pd.Series]]]:
        """Curves of `shardlab.report.quality`: of `train_loss` and, if there are any, `val_loss`,
        by run and seed."""
        smoothed = {
            run: {seed: training_curve(losses) for seed, losses in seeds.items()}
            for run, seeds in self.losses.items()
        }
        validation = {"val_loss": self.validation} if self.validation else {}
        return {"train_loss": smoothed, **validation}

    @property
    def quality_rows(self) -> list[dict[str, Any]]:
        """One row per run and seed: `quality.quality_row`."""
        return [
            quality_row(
                record,
                {name: by_run[record.run][record.seed] for name, by_run in self.curves.items()},
                self.quality,
            )
            for record in self.all_records
        ]

    def run_table(self, title: str, columns: Sequence[Column]) -> Table:
        """Return a table with a row per run of `trained`, and the warning of too few seeds."""
        return self.main_table(title, columns, self.trained.reset_index().to_dict("records"))

    def main_table(
        self, title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]
    ) -> Table:
        """Return a table of rows like `main_rows`, without empty columns, and the warning of too
        few seeds."""
        warning = seed_warning(self.records)
        return make_table(title, columns, rows, self.baseline, warning=warning).filled()

    def timing_table(self, title: str, columns: Sequence[Column], rows: pd.DataFrame) -> Table:
        """Return a table with a line for each of `rows`, a selection of `timing_rows`."""
        return make_table(title, columns, rows.to_dict("records"), self.baseline)


def is_on(entry: TimingResult | Decision, size: int, link: str) -> bool:
    """Return whether a race or a search is on so many ranks and the link of a timing."""
    return (entry.world_size, entry.link) == (size, link.removesuffix(" (in-process)"))


Builder = Callable[[Evidence], Section | None]
"""builder of a section; returns None where the evidence has nothing for it"""
