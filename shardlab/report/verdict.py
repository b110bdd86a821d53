"""Verdict on each link: the strategy to use, or one device alone.

The rule is that of `shardlab.choose.rank`. Strategies of equal numerics share their quality, which
counts on as many ranks as it was measured on. On the link of its races, what the search holds is a
candidate, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from shardlab.choose.history import Numerics
from shardlab.choose.rank import Option, Ranking, rank, simplicity_of
from shardlab.report.aggregate import costs, measurements
from shardlab.report.evidence import Evidence, is_on, last_decisions
from shardlab.report.tables import estimate
from shardlab.report.timings import timing_table
from shardlab.results.interval import Ratio, enclosing, paired_ratio
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import CanonicalStrategy, parse_strategy

_UNKNOWN = Ratio(math.nan, math.nan, math.nan)
_ONE_DEVICE = "one device alone"
_ALONE = ["alone_ratio", "alone_ratio_low", "alone_ratio_high"]


@dataclass(frozen=True, eq=False)
class Choice:
    """A strategy that was timed on a link."""

    name: str
    strategy: CanonicalStrategy
    rows: Sequence[pd.Series]
    """of `timing_table`: of the timing, and of each race on its ranks and link"""
    steps: Mapping[str, Sequence[float]]
    """milliseconds of each repetition, by timing or race"""
    lossless: bool
    """without codecs and synchronisation of parameters, in the data types of the baseline"""
    cost: pd.Series
    """of `aggregate.costs`; NaN where it is unknown"""
    searched: bool = False
    """found by the search, and no run of the experiment"""

    def ratio(self, name: str) -> Ratio:
        """Return a ratio of `timing_table`; of several timings and races what `enclosing` says."""
        ratios = [Ratio(*estimate(row, name)) for row in self.rows if not math.isnan(row[name])]
        return enclosing(ratios) if ratios else _UNKNOWN

    def over(self, other: "Choice") -> Ratio:
        """Return the step over that of another: in pairs, in all timings and races of both; if
        there is none, by way of the no-communication bound, which each of them has."""
        shared = [
            zip(steps, other.steps[timing], strict=False)
            for timing, steps in self.steps.items()
            if timing in other.steps
        ]
        if not shared:
            return self.ratio("bound_ratio").over(other.ratio("bound_ratio"))
        return enclosing(paired_ratio(*zip(*pairs, strict=True)) for pairs in shared)

    @property
    def option(self) -> Option:
        """What is ranked; its step is over one without communication."""
        perplexity = Ratio(*estimate(self.cost, "ppl_ratio"))
        return Option(
            self.name,
            self.ratio("bound_ratio"),
            devices=self.rows[0]["world_size"],
            lossless=self.lossless,
            perplexity=None if math.isnan(perplexity.ratio) else perplexity,
            simplicity=simplicity_of(self.strategy),
        )


@dataclass(frozen=True)
class LinkVerdict:
    """Recommendation for one link."""

    timing: pd.DataFrame
    """rows of `timing_table`"""
    alone: bool
    """whether one device alone comes before `use`"""
    beaten: frozenset[str]
    """names of those than which one device alone is shown to be faster"""
    use: Choice | None
    """the best on several devices; None where none may be used"""
    lossless: Choice | None
    """likewise without loss"""
    same: list[Choice]
    """those that may be used as well and are not told apart from `use`; without loss if it is"""
    refused: list[Choice]
    """those that are shown to be faster than `use`, or than one device where nothing else may be
    used, and may not be used; all of these where it is not known how fast one device is"""
    sync_ratio: float
    """seconds of synchronisation for each of computation: the step of stock DDP over steps without
    communication, minus 1; NaN where it was not timed"""


def verdicts(evidence: Evidence) -> list[LinkVerdict]:
    """Return a verdict for each timing of several ranks, that of the main timing first."""
    candidates = _Candidates(evidence)
    return [
        _verdict(timing, candidates.of(timing), evidence.tolerance) for timing in evidence.several
    ]


def _verdict(timing: pd.DataFrame, choices: list[Choice], tolerance: float) -> LinkVerdict:
    by_name = {choice.name: choice for choice in choices}
    ranking = _ranking(by_name, tolerance)
    usable = [by_name[str(name)] for name in ranking.names if name != _ONE_DEVICE]
    use = next(iter(usable), None)
    alone = next((r.option for r in ranking.order if r.option.name == _ONE_DEVICE), None)
    same, refused = [], [by_name[str(ranked.option.name)] for ranked in ranking.apart]
    if use is not None:
        names = {option.name for option in ranking.same_as(use.option)}
        same = [c for c in usable if c.name in names and (c.lossless or not use.lossless)]
    if ranked := use.option if use else alone:
        refused = [c for c in refused if ranking.precedes(c.option, ranked)]
    return LinkVerdict(
        timing,
        alone=alone is not None and alone == ranking.first,
        beaten=frozenset(c.name for c in usable if alone and ranking.precedes(alone, c.option)),
        use=use,
        lossless=next((choice for choice in usable if choice.lossless), None),
        same=same,
        refused=refused,
        sync_ratio=_sync_ratio(choices),
    )


def _ranking(choices: Mapping[str, Choice], tolerance: float) -> Ranking:
    """Rank the strategies of a link by their paired steps, with one device alone."""

    def compare(one: Option, other: Option) -> Ratio:
        if one.name == _ONE_DEVICE:
            return compare(other, one).inverse
        choice = choices[str(one.name)]
        if other.name == _ONE_DEVICE:
            return choice.ratio("alone_ratio")
        return choice.over(choices[str(other.name)])

    # how long one device takes for as many tokens, over the same reference
    alone = [
        Option(_ONE_DEVICE, choice.ratio("bound_ratio").over(over))
        for choice in choices.values()
        if not math.isnan((over := choice.ratio("alone_ratio")).ratio)
    ][:1]
    options = [choice.option for choice in choices.values()]
    return rank(options, alone, tolerance, compare=compare)


def _sync_ratio(choices: Sequence[Choice]) -> float:
    for choice in choices:
        engine, gradients, sync = (
            getattr(choice.strategy, name) for name in ("engine", "gradients", "sync")
        )
        if engine == "ddp" and gradients.plain() and gradients.route == "native" and sync is None:
            return max(choice.ratio("bound_ratio").ratio - 1, 0.0)
    return math.nan


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
        failed = {*compared.index[compared["divergence"] != ""], *lost}
        rows, raced = timing.set_index("run", drop=False), self._raced(timing)
        choices = {}
        for run in self._evidence.timed:
            if run.timing != rows["timing"].iloc[0] or run.strategy is None or run.run in failed:
                continue
            strategy = parse_strategy(run.strategy).canonical()
            timed = [(rows.loc[run.run], run), *raced.get(strategy.hash(), [])]
            choices[run.run] = self._choice(run.run, strategy, timed)
        hashes = {choice.strategy.hash() for choice in choices.values()}
        for name, key in self._held(timing).items():
            if key in raced and key not in hashes:
                strategy = self._evidence.history.measured[key].strategy
                choice = self._choice(name, strategy, raced[key])
                choices[name] = replace(choice, searched=True)
        return [*choices.values()]

    def _choice(
        self,
        name: str,
        strategy: CanonicalStrategy,
        timed: Sequence[tuple[pd.Series, TimingResult]],
    ) -> Choice:
        numerics, key = Numerics.of(strategy), strategy.hash()
        coded = numerics.gradients or numerics.weights or numerics.sync
        lossless = not coded and numerics.types == Numerics.of(self._base).types
        trained = key in self._costs.index
        key = key if trained else self._alike.get(numerics, "")
        cost = self._costs.reindex([key]).iloc[0].copy()
        if timed[0][1].world_size != self._evidence.records[0].world_size:
            cost[:] = math.nan
        elif not trained:
            cost[cost.index.str.startswith("memory")] = math.nan
        rows, steps = [row for row, _ in timed], {r.timing: r.measured_ms() for _, r in timed}
        return Choice(name, strategy, rows, steps, bool(lossless), cost)

    def _raced(self, timing: pd.DataFrame) -> dict[str, list[tuple[pd.Series, TimingResult]]]:
        """Return what each race on the ranks and the link of a timing has of a strategy, by hash.

        Races do not time one device. Its ratio to the no-communication bound is taken from the
        timing.
        """
        size, link = timing[["world_size", "link"]].iloc[0]
        bound = timing[timing["run"] == NO_COMMUNICATION]
        raced: dict[str, list[tuple[pd.Series, TimingResult]]] = {}
        for race in self._evidence.history.races.values():
            runs = [run for run in race if is_on(run, size, link)]
            if not runs:
                continue
            rows = timing_table(runs, self._base.hash()).set_index("run", drop=False)
            for run in runs:
                row = rows.loc[run.run].copy()
                if not bound.empty:
                    alone = Ratio(*estimate(bound.iloc[0], "alone_ratio"))
                    row[_ALONE] = Ratio(*estimate(row, "bound_ratio")).times(alone)
                raced.setdefault(run.run, []).append((row, run))
        return raced

    def _held(self, timing: pd.DataFrame) -> dict[str, str]:
        """Return the hash of what each search on the ranks and link of a timing holds, by name."""
        size, link = timing[["world_size", "link"]].iloc[0]
        last = last_decisions(self._evidence.history, self._evidence.names)
        return {
            name: decision.held
            for name, decision in last.items()
            if decision.fits and is_on(decision, size, link)
        }
