"""The rule that chooses: what reaches the same quality first, on this link and this memory?

Plans, probes, the judge of a search, the decision of a round, the verdict of a report and published
comparisons ask it, and word its answer. docs/choosing.md states it for readers.

- Ranked are times to the same loss where losses were measured. Otherwise steps for as many samples
  are, of strategies that keep the quality: without loss, or with a measured perplexity whose whole
  interval is tolerated. Apart stands what may not be used, with the reason. Where only its quality
  is unknown, so does its break-even: how many times as many samples to a loss it may need and still
  be there as soon as the fastest without loss.
- One option is told apart from another by the interval of their ratio; where there is none, by
  `MARGIN`. A prediction has to be better than a measurement by `MARGIN` in any case.
- Of options that are not told apart come first: the one in use, what was measured, what is shown
  to beat one device, what has no loss, what is simpler (torch's own), fewer devices, and the
  smaller mean.
"""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardlab.core.numbers import within
from shardlab.results.interval import Ratio
from shardlab.strategy.document import CanonicalStrategy
from shardlab.strategy.engine_traits import EngineName

MARGIN = 0.1
"""Relative gain that tells two options apart where no interval does.

Predictions of the same ranks and link err by some percent from one strategy to another: by 3.6 % in
the median where operations were measured, by up to 13 % where they were not (docs/how-to/plan.md).
A smaller gain is worth neither a second device nor a codec.
"""
TORCH_ENGINES: tuple[EngineName, ...] = ("ddp", "fsdp2", "fsdp1")
"""Engines of torch, the simplest first."""


class Option(NamedTuple):
    """One way to train that may be chosen."""

    name: Hashable
    """Unique among the options, such as a name or the hash of the strategy."""
    step: Ratio | None
    """Time for as many samples over that of a common reference; None: unknown."""
    devices: int = 1
    measured: bool = True
    """Whether the time was measured rather than predicted."""
    lossless: bool = True
    """Whether it computes what the baseline of the quality computes."""
    perplexity: Ratio | None = None
    """Perplexity over the baseline's; None: unknown."""
    to_loss: Ratio | None = None
    """Time to the same loss over that of the common reference; None: unknown."""
    memory: float = 0.0
    """Bytes of a rank at its peak."""
    simplicity: int = 0
    """Smaller is simpler: `simplicity_of`, or what changes training less."""
    label: str = ""
    """Name in reasons, where it is another one."""

    @property
    def title(self) -> str:
        """Name in reasons."""
        return self.label or str(self.name)

    @property
    def time(self) -> Ratio | None:
        """What is ranked; None where it is unknown, also where no repetition was measured (NaN)."""
        time = self.step if self.to_loss is None else self.to_loss
        return None if time is None or math.isnan(time.ratio) else time


Compare = Callable[[Option, Option], Ratio]
"""Returns the time of one option over that of another."""


class Ranked(NamedTuple):
    """An option and why it stands where it does."""

    option: Option
    reason: str


@dataclass(frozen=True)
class Ranking:
    """Options in the order in which they should be used, and those that may not be used."""

    order: Sequence[Ranked]
    apart: Sequence[Ranked]
    """The most promising first, those of unknown time last."""
    break_even: dict[str, float]
    """How many times as many samples to a loss each option of unknown quality may need and still
    reach it as soon as any without loss, by name, in the order of `apart`."""
    compare: Compare

    @property
    def names(self) -> list[Hashable]:
        """Names of `order`."""
        return [ranked.option.name for ranked in self.order]

    @property
    def first(self) -> Option | None:
        """What to use; None where nothing may be used."""
        return self.order[0].option if self.order else None

    @property
    def gaining(self) -> list[str]:
        """Names of those that may need more samples by more than `MARGIN`, the best first."""
        return [name for name, ratio in self.break_even.items() if ratio > 1 + MARGIN]

    def precedes(self, one: Option, other: Option) -> bool:
        """Return whether an option is shown to be faster than another."""
        return is_faster(one, other, self.compare)

    def same_as(self, option: Option) -> list[Option]:
        """Return the options that may be used as well and are not told apart from one."""
        others = (ranked.option for ranked in self.order)
        return [
            other
            for other in others
            if other.name != option.name
            and not (self.precedes(option, other) or self.precedes(other, option))
        ]


def quotient(one: Option, other: Option) -> Ratio:
    """Return the time of one option over that of another, by way of the common reference."""
    assert one.time is not None and other.time is not None, "options without a time are apart"
    return one.time.times(other.time.inverse)


def is_faster(one: Option, other: Option, compare: Compare = quotient) -> bool:
    """Return whether an option is told apart from another as the faster one."""
    if one.name == other.name or one.time is None or other.time is None:
        return False
    ratio = compare(one, other)
    beyond_margin = ratio.ratio * (1 + MARGIN) < 1
    if math.isnan(ratio.high):
        return beyond_margin
    return ratio.high < 1 and (one.measured or not other.measured or beyond_margin)


def is_tolerated(perplexity: Ratio | None, tolerance: float, lossless: bool = False) -> bool:
    """Return whether a perplexity over the baseline's is shown to be within a tolerance.

    Its whole interval has to be; one seed has none. Without loss the mean is enough, or nothing.
    """
    if lossless:
        return perplexity is None or not perplexity.ratio > 1 + tolerance
    return perplexity is not None and perplexity.high <= 1 + tolerance


def simplicity_of(strategy: CanonicalStrategy) -> int:
    """Return how simple a strategy is: first torch's own engines, then those of this project; after
    all of them, in the same order, what has codecs, collectives or parameter synchronisation of
    this project."""
    engine = strategy.engine
    order = TORCH_ENGINES.index(engine) if engine in TORCH_ENGINES else len(TORCH_ENGINES)
    exchanged = strategy.gradients.route == "exchange" and engine in TORCH_ENGINES
    plain = strategy.gradients.plain() and strategy.weights is None and strategy.sync is None
    added = exchanged or not plain
    return order + added * (len(TORCH_ENGINES) + 1)


def rank(
    options: Sequence[Option],
    alone: Sequence[Option],
    tolerance: float,
    memory: float | None = None,
    compare: Compare = quotient,
    in_use: Hashable | None = None,
) -> Ranking:
    """Order the options.

    Args:
        options: on several devices or nodes.
        alone: one device and one node alone, at their best settings, which are options too; empty
            only where nobody knows how fast they are.
        tolerance: largest relative rise of perplexity.
        memory: bytes that a rank has; None: as much as any option needs.
        compare: of two options; paired measurements, where there are any.
        in_use: name of the option that only what is shown to be faster displaces.
    """
    everything = [*options, *alone]
    names = [option.name for option in everything]
    assert len({*names}) == len(names), "options have names of their own"
    ratios: dict[tuple[Hashable, Hashable], Ratio] = {}

    def cached(one: Option, other: Option) -> Ratio:
        pair = one.name, other.name
        if pair not in ratios:
            ratios[pair] = compare(one, other)
        return ratios[pair]

    by_loss = any(option.to_loss is not None for option in everything)
    why = {o.name: _objection(o, tolerance, memory, by_loss) for o in everything}
    usable = [option for option in everything if not why[option.name]]
    beaten = [option for option in alone if not why[option.name]]
    rule = _Order(cached, beaten, in_use)
    order = rule.in_order(usable)
    lossless = [option for option in order if option.lossless]
    best = min(lossless, key=rule.mean, default=None)
    apart = rule.in_order(option for option in everything if why[option.name])
    apart.sort(key=lambda option: option.time is None)
    return Ranking(
        [Ranked(option, rule.reason(option, order)) for option in order],
        [Ranked(option, why[option.name]) for option in apart],
        {
            str(option.name): cached(best, option).ratio
            for option in apart
            if best is not None and why[option.name] == _UNMEASURED
        },
        cached,
    )


_UNMEASURED = "its perplexity was not measured"


def _objection(option: Option, tolerance: float, memory: float | None, by_loss: bool) -> str:
    """Return why an option may not be used; empty: it may."""
    limit, perplexity = f"{1 + tolerance:.3f} times the baseline's", option.perplexity
    reasons = []
    if memory is not None and option.memory > memory:
        reasons.append(f"peak memory is above {memory / 1e6:.0f} MB")
    if by_loss:
        if option.to_loss is None or option.time is None:
            reasons.append("its time to the loss was not measured")
        return ", ".join(reasons)
    if option.time is None:
        reasons.append("its step is neither measured nor predicted")
    if not is_tolerated(perplexity, tolerance, option.lossless):
        if perplexity is None or math.isnan(perplexity.ratio):
            reasons.append(_UNMEASURED)
        elif not perplexity.ratio <= 1 + tolerance:
            reasons.append(f"its perplexity is above {limit}")
        else:
            seeds = ": one seed has no interval" if math.isnan(perplexity.high) else ""
            reasons.append(f"its perplexity is not shown to be below {limit}{seeds}")
    return ", ".join(reasons)


_CRITERIA = (
    "is in use",
    "was measured",
    "is shown to beat one device alone",
    "has no loss",
    "is simpler",
    "needs fewer devices",
    "has the smaller mean",
)


class _Order:
    """Order of options by what is shown, and then by what is preferable."""

    def __init__(
        self, compare: Compare, alone: Collection[Option], in_use: Hashable | None
    ) -> None:
        self._compare, self._alone, self._in_use = compare, alone, in_use

    def is_faster(self, one: Option, other: Option) -> bool:
        return is_faster(one, other, self._compare)

    def in_order(self, options: Iterable[Option]) -> list[Option]:
        """Return the options such that none stands before one that is shown to be faster; what is
        not shown to be faster than the one in use stands behind that."""
        left = sorted(options, key=lambda option: (*self._key(option), str(option.name)))
        used = next((option for option in left if option.name == self._in_use), None)
        if used is None:
            return self._sorted(left)
        ahead = [option for option in left if self.is_faster(option, used)]
        behind = [option for option in left if option not in (used, *ahead)]
        return [*self._sorted(ahead), used, *self._sorted(behind)]

    def _sorted(self, preferred: Iterable[Option]) -> list[Option]:
        """Return the options, the preferable first, such that none stands before one that is shown
        to be faster."""
        left, order = [*preferred], []
        while left:
            beaten = {o.name for o in left if any(self.is_faster(other, o) for other in left)}
            # paired measurements of different repetitions may contradict each other
            first = next((option for option in left if option.name not in beaten), left[0])
            left.remove(first)
            order.append(first)
        return order

    def _key(self, option: Option) -> tuple[float, ...]:
        """Return what decides among options that are not told apart, as in `_CRITERIA`."""
        return (
            option.name != self._in_use,
            not option.measured,
            self._beats_alone(option),
            not option.lossless,
            option.simplicity,
            option.devices,
            self.mean(option),
        )

    def mean(self, option: Option) -> float:
        """Return the mean time, infinite where it is unknown."""
        return math.inf if option.time is None else option.time.ratio

    def _beats_alone(self, option: Option) -> int:
        """Return 0 where an option is shown to be faster than one device and one node alone, 2
        where it is shown to be slower than one of them, 1 otherwise."""
        if not self._alone or option in self._alone:
            return 1
        if all(self.is_faster(option, one) for one in self._alone):
            return 0
        return 2 if any(self.is_faster(one, option) for one in self._alone) else 1

    def reason(self, option: Option, order: Sequence[Option]) -> str:
        """Return why an option has its place in the order."""
        first, *later = order
        if option is not first:
            if self.is_faster(first, option):
                longer = within(*self._compare(option, first), 2)
                return f"takes {longer} times as long as {first.title}"
            return f"not told apart from {first.title}, which {self._difference(first, option)}"
        same = [other for other in later if not self.is_faster(first, other)]
        if not same:
            return "shown to be the fastest" if later else "nothing else may be used"
        return f"not told apart from {same[0].title}, but {self._difference(first, same[0])}"

    def _difference(self, first: Option, other: Option) -> str:
        pairs = zip(_CRITERIA, self._key(first), self._key(other), strict=True)
        return next((what for what, one, second in pairs if one < second), "is shown to be faster")
