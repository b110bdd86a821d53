"""Time to one loss: the options on each link, and the best of each kind by the rule that chooses.

Time to a loss is steps to it times the mean step of a timing. Losses do not depend on the link, and
steps not on the learning rate: each method is trained once, and its steps are timed on each link.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlab.choose.rank import Option, rank, simplicity_of
from shardlab.predict.asked import changes_training
from shardlab.report.tuned import Curve, Tuned
from shardlab.results.interval import Ratio, geometric_mean, interleaved_ratio, paired_ratio
from shardlab.results.timing_result import TimingResult
from shardlab.strategy.compression import Compression
from shardlab.strategy.document import Strategy, parse_strategy

ONE_DEVICE = "one device"
STOCK = "stock torch"
COMPRESSED = "compressed steps"
SYNCHRONISED = "parameter synchronisation"
FAMILIES = (ONE_DEVICE, STOCK, COMPRESSED, SYNCHRONISED)


@dataclass(frozen=True, eq=False)
class Way:
    """A way to the loss: a method, its micro-batches, and the strategy whose steps count."""

    title: str
    """with the micro-batches of a step, of all ranks together"""
    curve: Curve
    strategy: Strategy
    """of the steps"""
    ranks: int

    @property
    def family(self) -> str:
        """Kind of the method: of what it trained, since other strategies of it train the same."""
        trained = self.curve.strategy
        if self.ranks == 1:
            return ONE_DEVICE
        if trained.sync is not None:
            return SYNCHRONISED
        return COMPRESSED if changes_training(trained.canonical()) else STOCK

    @property
    def mean_steps(self) -> float:
        """Geometric mean of the steps to the loss over the seeds."""
        return geometric_mean([*self.curve.steps.values()]).ratio


def ways_of(tuned: Tuned) -> list[Way]:
    """Return all ways: each strategy of each method, and one device with the micro-batches of a
    method that changes no training, which has the same samples in each step."""
    named: list[tuple[str, Curve, Strategy, int]] = []
    for curve in tuned.listed:
        lossy = changes_training(curve.strategy.canonical())
        if not lossy:
            named.append((ONE_DEVICE, curve, curve.strategy, 1))
        for name in curve.method.strategies if curve.ranks > 1 or lossy else ():
            named.append((name, curve, tuned.strategies[name], curve.ranks))
    count = Counter((name, curve.micro_batches) for name, curve, _, _ in named)
    ways = []
    for name, curve, strategy, ranks in named:
        several = f" ({curve.name})" * (count[name, curve.micro_batches] > 1)
        ways.append(Way(f"{name}/{curve.micro_batches}{several}", curve, strategy, ranks))
    return ways


StepKey = tuple[int, int, str | None]
"""ranks, micro-batches of each, and the hash of the strategy after its warm-ups; None: without
communication"""


class LinkTimes:
    """Step times on one link, in ms, of timings that took turns.

    So ratios are of pairs of repetitions: what slows one down slows both.
    """

    def __init__(self, runs: Iterable[TimingResult], tuned: Tuned) -> None:
        self._runs: dict[StepKey, TimingResult] = {}
        for run in runs:
            step = None if run.strategy is None else _step_of(parse_strategy(run.strategy))
            self._runs.setdefault((run.world_size, run.accumulation, step), run)
        self.timings = {run.timing for run in self._runs.values()}
        several = [run for run in self._runs.values() if run.world_size > 1]
        self.name = several[0].link
        stock = tuned.strategies.get(tuned.baseline)
        ranks, parts = several[0].world_size, tuned.train.accumulation
        self.stock_over_bound: Ratio | None = None
        """step of the baseline over one without communication"""
        if stock is not None:
            keys: list[StepKey] = [(ranks, parts, _step_of(stock)), (ranks, parts, None)]
            if all(key in self._runs for key in keys):
                self.stock_over_bound = interleaved_ratio(*map(self._measured, keys))

    @property
    def ratio(self) -> float:
        """Synchronisation over computation: how much longer the step of the baseline is."""
        assert self.stock_over_bound is not None, "links without the baseline are left out"
        return self.stock_over_bound.ratio - 1

    def has(self, way: Way) -> bool:
        """Return whether the steps of a way to the loss were timed."""
        return all(key in self._runs for key in self._keys(way))

    def step_ms(self, way: Way) -> list[float]:
        """Return the mean step of a run that ends at the loss, by repetition; NaN where the machine
        paused."""
        later, *first = map(self._measured, self._keys(way))
        if not first:
            return later
        share = min(_warm_up(way.strategy)[0] / way.mean_steps, 1.0)
        return [share * a + (1 - share) * b for a, b in zip(first[0], later, strict=False)]

    def seconds(self, way: Way) -> float:
        """Return the mean seconds to the loss."""
        return way.mean_steps * geometric_mean(self.step_ms(way)).ratio / 1e3

    def gain(self, way: Way, other: Way) -> Ratio:
        """Return the time to the loss of another way over that of a way: steps in pairs of seeds,
        their times in pairs of repetitions."""
        step = interleaved_ratio(self.step_ms(other), self.step_ms(way))
        if way.curve is other.curve:  # equal steps, whatever the number of seeds
            return step
        mine, theirs = way.curve.steps, other.curve.steps
        seeds = [seed for seed in mine if seed in theirs]
        steps = paired_ratio([theirs[s] for s in seeds], [mine[s] for s in seeds])
        return step.times(steps)

    def _keys(self, way: Way) -> list[StepKey]:
        """Return what was timed of a way: its step, and that of its warm-up if it has one."""
        parts = way.curve.micro_batches // way.ranks
        if way.ranks == 1 and not changes_training(way.strategy.canonical()):
            return [(1, parts, None)]
        warm_up = _warm_up(way.strategy)[1]
        steps = [way.strategy, *([] if warm_up is None else [warm_up])]
        return [(way.ranks, parts, _step_of(strategy)) for strategy in steps]

    def _measured(self, key: StepKey) -> list[float]:
        return self._runs[key].measured_ms()


def _step_of(strategy: Strategy) -> str:
    return strategy.after_warmup().hash()


def _warm_up(strategy: Strategy) -> tuple[int, Strategy | None]:
    """Return the steps of a warm-up and the strategy of these; None where there is none."""
    first: dict[str, Any] = {"gradients": Compression(route="exchange")}
    steps = strategy.gradients.warmup_steps
    if strategy.sync is not None:
        first, steps = {"sync": None}, strategy.sync.warmup_steps
    return steps, strategy.model_copy(update=first) if steps else None


def links_of(
    timed: Sequence[TimingResult], turns: Mapping[str, str], tuned: Tuned
) -> list[LinkTimes]:
    """Return the links on which the baseline was timed, from fast to slow: timings of several ranks
    that took turns on a link, with those of one rank that took the same turns."""
    alone: dict[str, list[TimingResult]] = {}
    several: dict[tuple[str, str, int], list[TimingResult]] = {}
    for run in timed:
        holder = turns.get(run.timing, run.timing)
        if run.world_size == 1:
            alone.setdefault(holder, []).append(run)
        else:
            several.setdefault((holder, run.link, run.world_size), []).append(run)
    links = [LinkTimes([*runs, *alone.get(key[0], [])], tuned) for key, runs in several.items()]
    return sorted(
        (link for link in links if link.stock_over_bound is not None), key=lambda link: link.ratio
    )


class Comparison:
    """The ways on a link, ranked by their time to the loss."""

    def __init__(self, ways: Sequence[Way], link: LinkTimes) -> None:
        ways = [way for way in ways if way.curve.competes and way.curve.steps and link.has(way)]
        by_title = {way.title: way for way in ways}

        def compare(one: Option, other: Option) -> Ratio:
            return link.gain(by_title[str(other.name)], by_title[str(one.name)])

        options = {way.title: _option(way, ways[0], link) for way in ways}
        alone = [options[way.title] for way in ways if way.family == ONE_DEVICE]
        several = [option for option in options.values() if option not in alone]
        ranking = rank(several, alone, tolerance=0.0, compare=compare)
        self.link, self.order = link, [by_title[str(name)] for name in ranking.names]
        self._ranking, self._options = ranking, options

    def first(self, family: str) -> Way | None:
        """Return the way to use of a kind; None where none of it reaches the loss."""
        return next((way for way in self.order if way.family == family), None)

    def same_as(self, way: Way) -> list[Way]:
        """Return the ways that are not told apart from one."""
        same = {option.name for option in self._ranking.same_as(self._options[way.title])}
        return [other for other in self.order if other.title in same]

    def gains(self) -> dict[str, tuple[Ratio, Way]]:
        """Return what the first of all gains over the first of each other kind."""
        gains = {}
        for family in FAMILIES:
            other = self.first(family)
            if other is not None and family != self.order[0].family:
                gains[family] = self.link.gain(self.order[0], other), other
        return gains

    def over_one_device(self) -> dict[str, Ratio]:
        """Return what the first of each kind gains over one device."""
        alone = self.first(ONE_DEVICE)
        firsts = {family: self.first(family) for family in FAMILIES}
        return {
            family: self.link.gain(way, alone)
            for family, way in firsts.items()
            if way is not None and alone is not None
        }


def compare_links(
    timed: Sequence[TimingResult], turns: Mapping[str, str], tuned: Tuned
) -> list[Comparison]:
    """Return the comparison on each link on which a way of several ranks reaches the loss."""
    ways = ways_of(tuned)
    compared = [Comparison(ways, link) for link in links_of(timed, turns, tuned)]
    return [comparison for comparison in compared if any(way.ranks > 1 for way in comparison.order)]


def _option(way: Way, reference: Way, link: LinkTimes) -> Option:
    """Return a way as an option: its time to the loss over that of a reference."""
    canonical = way.strategy.canonical()
    return Option(
        way.title,
        step=None,
        to_loss=link.gain(reference, way),
        devices=way.ranks,
        lossless=not changes_training(canonical),
        simplicity=simplicity_of(canonical),
    )
