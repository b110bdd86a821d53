"""Verdict on each link: the strategy to use, or one device alone.

A strategy is recommended over another only where the interval of their steps shows that it is
faster. Among those that intervals do not tell apart come first what is shown to be faster than one
device, then torch's own engines, in the order of `STOCK`, before one of this project. One with
loss needs a perplexity that was measured on as many ranks, with its whole interval within the
tolerance. Strategies of equal numerics share their quality. On the link of its races, what the
search holds is a candidate, too.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from shardlab.choose.history import Numerics
from shardlab.report.aggregate import costs, measurements
from shardlab.report.evidence import Evidence, is_on, last_decisions
from shardlab.report.tables import estimate
from shardlab.report.timings import timing_table
from shardlab.results.interval import Ratio, enclosing, paired_ratio
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import CanonicalStrategy, parse_strategy
from shardlab.strategy.engine_traits import EngineName

STOCK: tuple[EngineName, ...] = ("ddp", "fsdp2", "fsdp1")
"""engines of torch; of strategies that are not told apart the first one in this order is named"""
_UNKNOWN = Ratio(math.nan, math.nan, math.nan)
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
            return self.ratio("bound_ratio").times(other.ratio("bound_ratio").inverse)
        return enclosing(paired_ratio(*zip(*pairs, strict=True)) for pairs in shared)

    @property
    def speed(self) -> float:
        """Number that orders the strategies of a link: smaller is faster."""
        return self.ratio("bound_ratio").ratio

    @property
    def stock_order(self) -> int:
        """Index in `STOCK`, or its length. Torch's own collectives are part of it."""
        engine, route = self.strategy.engine, self.strategy.gradients.route
        is_stock = engine in STOCK and not (self.lossless and route == "exchange")
        return STOCK.index(engine) if is_stock else len(STOCK)

    @property
    def alone_order(self) -> int:
        """0 where it is shown to be faster than one device alone, 2 where it is shown to be slower,
        1 where neither is, or nothing is known."""
        alone = self.ratio("alone_ratio")
        return 0 if alone.high < 1 else 2 if alone.low > 1 else 1

    def is_shorter(self, other: "Choice") -> bool:
        """Return whether its step is shown to be shorter."""
        return self is not other and self.over(other).high < 1

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
    """what may be recommended, and nothing of that is shown to be faster"""
    lossless: Choice | None
    """likewise without loss"""
    same: list[Choice]
    """those that may be recommended as well and are not told apart from `use`; without loss if it
    is"""
    refused: list[Choice]
    """those that are shown to be faster and may not be recommended"""
    sync_ratio: float
    """seconds of synchronisation for each of computation: the step of stock DDP over steps without
    communication, minus 1; NaN where it was not timed"""


def verdicts(evidence: Evidence) -> list[Verdict]:
    """Return a verdict for each timing of several ranks, that of the main timing first."""
    candidates = _Candidates(evidence)
    return [
        _verdict(timing, candidates.of(timing), evidence.tolerance) for timing in evidence.several
    ]


def _verdict(timing: pd.DataFrame, choices: list[Choice], tolerance: float) -> Verdict:
    ordered = sorted(choices, key=lambda choice: choice.speed)
    tolerated = [choice for choice in ordered if choice.is_tolerated(tolerance)]
    free = [choice for choice in tolerated if choice.lossless]
    lossless = _preferred(free)
    lossy = [choice for choice in tolerated if not choice.lossless]
    use = _preferred([c for c in lossy if lossless is None or c.is_shorter(lossless)]) or lossless
    refused = [choice for choice in ordered if choice not in tolerated]
    return Verdict(
        timing,
        use,
        lossless,
        same=[c for c in (free if use is lossless else tolerated) if use and _is_same(use, c)],
        refused=[c for c in refused if use is None or c.is_shorter(use)],
        sync_ratio=_sync_ratio(choices),
    )


def _preferred(choices: Sequence[Choice]) -> Choice | None:
    """Return one that no other is shown to be faster than; of several one that beats one device,
    then the first in the order of `STOCK`."""
    best = [one for one in choices if not any(other.is_shorter(one) for other in choices)]

    def order(choice: Choice) -> tuple[int, int, float]:
        return choice.alone_order, choice.stock_order, choice.speed

    return min(best, key=order, default=None)


def _is_same(one: Choice, other: Choice) -> bool:
    _, low, high = one.over(other)
    return one is not other and low <= 1 <= high


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
        own = key in self._costs.index
        key = key if own else self._alike.get(numerics, "")
        cost = self._costs.reindex([key]).iloc[0].copy()
        if timed[0][1].world_size != self._evidence.records[0].world_size:
            cost[:] = math.nan
        elif not own:
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
