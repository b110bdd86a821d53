"""Verdict on each link: the strategy to use, or one device alone.

A strategy with loss is recommended where its perplexity was measured on as many ranks, its whole
interval is within the tolerance, and its step is shown to be shorter than the shortest without
loss. Strategies of equal numerics share their quality. On the link of its races, what the search
holds is a candidate, too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pandas as pd

from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.report.aggregate import costs, measurements
from shardlab.report.evidence import Evidence
from shardlab.report.tables import estimate
from shardlab.report.timings import timing_table
from shardlab.search.history import Numerics


@dataclass(frozen=True, eq=False)
class Choice:
    """A strategy that was timed on a link."""

    name: str
    strategy: CanonicalStrategy
    row: pd.Series
    """of `timing_table`"""
    lossless: bool
    """without codecs and rare exchanges, in the data types of the baseline"""
    cost: pd.Series
    """of `aggregate.costs`; NaN where it is unknown"""
    searched: bool = False
    """found by the search, and no run of the experiment"""

    @property
    def step(self) -> tuple[float, float, float]:
        """Step with its interval: over that of one device alone for as many tokens, or over the
        baseline's, or in ms, whichever is there."""
        for name in ("alone_ratio", "step_ratio"):
            if not math.isnan(self.row[name]):
                return estimate(self.row, name)
        return self.row["step_ms"], math.nan, math.nan

    def is_tolerated(self, tolerance: float) -> bool:
        """Return whether the whole interval of the perplexity is within the tolerance. Without loss
        a single seed is enough, or none."""
        mean, _, high = estimate(self.cost, "ppl_ratio")
        if self.lossless and math.isnan(high):
            return math.isnan(mean) or mean <= 1 + tolerance
        return bool(high <= 1 + tolerance)


@dataclass(frozen=True)
class Verdict:
    """Recommendation for one link."""

    timing: pd.DataFrame
    """rows of `timing_table`"""
    use: Choice | None
    """the fastest that may be recommended"""
    lossless: Choice | None
    """the fastest without loss"""
    refused: list[Choice]
    """those with a shorter step that may not be recommended"""


def verdicts(evidence: Evidence) -> list[Verdict]:
    """Return a verdict for each timing of several ranks, that of the main timing first."""
    found = _Candidates(evidence)
    return [_verdict(each, found.of(each), evidence.tolerance) for each in evidence.several]


def _verdict(timing: pd.DataFrame, choices: list[Choice], tolerance: float) -> Verdict:
    ordered = sorted(choices, key=lambda choice: choice.step[0])
    tolerated = [choice for choice in ordered if choice.is_tolerated(tolerance)]
    lossless = next((choice for choice in tolerated if choice.lossless), None)

    def is_shown(choice: Choice) -> bool:
        return lossless in (None, choice) or choice.step[2] < lossless.step[1]

    use = next(filter(is_shown, tolerated), None)
    faster = ordered[: ordered.index(use)] if use else ordered
    return Verdict(timing, use, lossless, [each for each in faster if each not in tolerated])


class _Candidates:
    """Strategies of the timings, and those that the search holds, with what they cost."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        strategies = {
            record.run: parse_strategy(record.strategy).canonical() for record in evidence.records
        }
        self._base = strategies[evidence.baseline]
        trained = {strategy.hash(): strategy for strategy in strategies.values()}
        records = {(strategies[r.run].hash(), r.seed): r for r in evidence.records}
        for key, row in evidence.history.measured.items():
            if key not in trained and row.trained:
                trained[key] = row.strategy
                records |= {(key, record.seed): record for record in row.trained}
        renamed = [r.model_copy(update={"run": key}) for (key, _), r in records.items()]
        self._costs = costs(measurements(renamed), self._base.hash())
        # of equal numerics the first one: those of the matrix come first
        self._alike = {Numerics.of(trained[key]): key for key in reversed([*trained])}

    def of(self, timing: pd.DataFrame) -> list[Choice]:
        """Return those on the ranks and the link of a timing, without runs that failed."""
        compared, lost = self._evidence.compared, self._evidence.lost
        diverged = {*compared.index[compared["divergence"] != ""]}
        name = timing["timing"].iloc[0]
        strategies = {
            run.run: parse_strategy(run.strategy).canonical()
            for run in self._evidence.timed
            if run.timing == name and run.strategy is not None
        }
        own = [
            self._choice(str(row["run"]), strategies[row["run"]], row)
            for _, row in timing.iterrows()
            if row["run"] in strategies and row["run"] not in {*diverged, *lost}
        ]
        known = {strategy.hash() for strategy in strategies.values()}
        return [*own, *(each for each in self._held(timing) if each.strategy.hash() not in known)]

    def _choice(self, name: str, strategy: CanonicalStrategy, row: pd.Series) -> Choice:
        numerics, key = Numerics.of(strategy), strategy.hash()
        coded = numerics.gradients or numerics.weights or numerics.sync
        lossless = not coded and numerics.types == Numerics.of(self._base).types
        own = key in self._costs.index
        key = key if own else self._alike.get(numerics, "")
        cost = self._costs.reindex([key]).iloc[0].copy()
        if row["world_size"] != self._evidence.records[0].world_size:
            cost[:] = math.nan
        elif not own:
            cost[cost.index.str.startswith("memory")] = math.nan
        return Choice(name, strategy, row, bool(lossless), cost)

    def _held(self, timing: pd.DataFrame) -> Iterator[Choice]:
        """Yield what each search holds, where it raced on the ranks and the link of a timing."""
        history, (size, link) = self._evidence.history, timing[["world_size", "link"]].iloc[0]
        for last in {decision.search: decision for decision in history.rounds}.values():
            here = last.world_size == size and last.link == link.removesuffix(" (in-process)")
            held = last.held, last.link, size
            races = [
                race
                for race in history.races
                if held in {(run.run, run.link, run.world_size) for run in race.runs}
            ]
            if not (here and last.fits and races):
                continue
            name = f"found-by-{last.search or 'search'}"
            names = {self._base.hash(): self._evidence.baseline, last.held: name}
            runs = [r.model_copy(update={"run": names.get(r.run, r.run)}) for r in races[-1].runs]
            rows = timing_table(runs, self._evidence.baseline)
            strategy = history.measured[last.held].strategy
            row = rows[rows["run"] == name].iloc[0]
            yield replace(self._choice(name, strategy, row), searched=True)
