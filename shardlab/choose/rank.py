"""The rule that chooses: which option reaches the same quality first, on this link and memory?

Plans, probes, the judge of a search, the decision of a round, the verdict of a report and published
comparisons use this rule and its reasons. docs/choosing.md states it for users.

- Options are ranked by the time to one loss where losses were measured. Otherwise they are ranked
  by the step for equally many samples. An option must then keep the quality: it has no loss, or the
  whole interval of its measured perplexity is tolerated.
- Options that may not be used are listed separately (`Ranking.apart`), with the reason. Where only
  the quality is unknown, the break-even is given: how many times as many samples an option may need
  to a loss and still reach it as soon as the fastest option without loss.
- Two options are told apart by the interval of their ratio; without an interval, by `MARGIN`. A
  prediction always has to be better than a measurement by `MARGIN`.
- Among options that are not told apart, these come first, in this order: the one in use, measured
  ones, those shown to beat one device, those without loss, simpler ones (torch's own), fewer
  devices, the smaller mean.
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
    """Unique name, such as the name or the hash of the strategy."""
    step: Ratio | None
    """Time for equally many samples, over the time of a common baseline; None: unknown."""
    devices: int = 1
    measured: bool = True
    """Whether the time was measured rather than predicted."""
    lossless: bool = True
    """Whether it computes what the baseline of the quality computes."""
    perplexity: Ratio | None = None
    """Perplexity over the baseline's; None: unknown."""
    to_loss: Ratio | None = None
    """Time to one loss over the time of the common baseline; None: unknown."""
    memory: float = 0.0
    """Peak of a rank in bytes."""
    simplicity: int = 0
    """Smaller is simpler: `simplicity_of`, or a rank by how little training changes."""
    label: str = ""
    """Name in reasons; empty: `name`."""

    @property
    def title(self) -> str:
        """Name in reasons."""
        return self.label or str(self.name)

    @property
    def time(self) -> Ratio | None:
        """Time that is ranked; None where it is unknown or no repetition was measured (NaN)."""
        time = self.step if self.to_loss is None else self.to_loss
        return None if time is None or math.isnan(time.ratio) else time


Compare = Callable[[Option, Option], Ratio]
"""Returns the time of the first option over the time of the second."""


class Ranked(NamedTuple):
    """An option and the reason for its position."""

    option: Option
    reason: str


@dataclass(frozen=True)
class Ranking:
    """Options in the order in which they should be used, and options that may not be used."""

    order: Sequence[Ranked]
    """Options that may be used, the best first."""
    apart: Sequence[Ranked]
    """Options that may not be used, the most promising first, options of unknown time last."""
    break_even: dict[str, float]
    """How many times as many samples to a loss an option of unknown quality may need and still
    reach it as soon as any option without loss; by name, in the order of `apart`."""
    compare: Compare

    @property
    def names(self) -> list[Hashable]:
        """Names of `order`."""
        return [ranked.option.name for ranked in self.order]

    @property
    def first(self) -> Option | None:
        """The option to use; None where no option may be used."""
        return self.order[0].option if self.order else None

    @property
    def gaining(self) -> list[str]:
        """Names of options with a break-even above 1 + `MARGIN`, the best first."""
        return [name for name, ratio in self.break_even.items() if ratio > 1 + MARGIN]

    def precedes(self, option: Option, other: Option) -> bool:
        """Return whether an option is shown to be faster than another."""
        return is_faster(option, other, self.compare)

    def same_as(self, option: Option) -> list[Option]:
        """Return the usable options that are not told apart from this one."""
        usable = (ranked.option for ranked in self.order)
        return [
            other
            for other in usable
            if other.name != option.name
            and not (self.precedes(option, other) or self.precedes(other, option))
        ]


def quotient(option: Option, other: Option) -> Ratio:
    """Return the time of an option over the time of another, both over the common baseline."""
    assert option.time is not None and other.time is not None, "both options have a time"
    return option.time.over(other.time)


def is_faster(option: Option, other: Option, compare: Compare = quotient) -> bool:
    """Return whether an option is shown to be faster than another."""
    if option.name == other.name or option.time is None or other.time is None:
        return False
    ratio = compare(option, other)
    beyond_margin = ratio.ratio * (1 + MARGIN) < 1
    if math.isnan(ratio.high):
        return beyond_margin
    return ratio.high < 1 and (option.measured or not other.measured or beyond_margin)


def is_tolerated(perplexity: Ratio | None, tolerance: float, lossless: bool = False) -> bool:
    """Return whether a perplexity over the baseline's is shown to be within a tolerance.

    The whole interval has to be within it, and one seed gives no interval. For an option without
    loss the mean is enough, and no measurement is needed.
    """
    if lossless:
        return perplexity is None or not perplexity.ratio > 1 + tolerance
    return perplexity is not None and perplexity.high <= 1 + tolerance


def simplicity_of(strategy: CanonicalStrategy) -> int:
    """Return the simplicity of a strategy; smaller is simpler.

    Torch's own engines come first, then the engines of this project. Strategies with codecs,
    collectives or `sync` of this project follow, in the same order.
    """
    engine = strategy.engine
    order = TORCH_ENGINES.index(engine) if engine in TORCH_ENGINES else len(TORCH_ENGINES)
    exchanged = strategy.gradients.route == "exchange" and engine in TORCH_ENGINES
    plain = strategy.gradients.plain() and strategy.weights is None and strategy.sync is None
    added = exchanged or not plain
    return order + added * (len(TORCH_ENGINES) + 1)


def rank(
    options: Sequence[Option],
    single: Sequence[Option],
    tolerance: float,
    memory: float | None = None,
    compare: Compare = quotient,
    in_use: Hashable | None = None,
) -> Ranking:
    """Order the options.

    Args:
        options: options on several devices or nodes.
        single: one device and one node at their best settings, which may also be chosen; empty only
            where their speed is unknown.
        tolerance: largest relative rise of perplexity.
        memory: bytes that a rank has; None: as many as any option needs.
        compare: comparison of two options, by paired measurements where there are any.
        in_use: name of an option that only an option shown to be faster may replace.
    """
    candidates = [*options, *single]
    names = [option.name for option in candidates]
    assert len({*names}) == len(names), "names of options are unique"
    ratios: dict[tuple[Hashable, Hashable], Ratio] = {}

    def cached(option: Option, other: Option) -> Ratio:
        pair = option.name, other.name
        if pair not in ratios:
            ratios[pair] = compare(option, other)
        return ratios[pair]

    by_loss = any(option.to_loss is not None for option in candidates)
    objections = {o.name: _objection(o, tolerance, memory, by_loss) for o in candidates}
    usable = [option for option in candidates if not objections[option.name]]
    usable_single = [option for option in single if not objections[option.name]]
    rule = _Order(cached, usable_single, in_use)
    order = rule.in_order(usable)
    lossless = [option for option in order if option.lossless]
    best = min(lossless, key=rule.mean, default=None)
    refused = rule.in_order(option for option in candidates if objections[option.name])
    refused.sort(key=lambda option: option.time is None)
    return Ranking(
        [Ranked(option, rule.reason(option, order)) for option in order],
        [Ranked(option, objections[option.name]) for option in refused],
        {
            str(option.name): cached(best, option).ratio
            for option in refused
            if best is not None and objections[option.name] == _UNMEASURED
        },
        cached,
    )


_UNMEASURED = "its perplexity was not measured"


def _objection(option: Option, tolerance: float, memory: float | None, by_loss: bool) -> str:
    """Return why an option may not be used; empty where it may be used."""
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
    """Order of options by measured or predicted time first, and by `_CRITERIA` among ties."""

    def __init__(
        self, compare: Compare, single: Collection[Option], in_use: Hashable | None
    ) -> None:
        self._compare, self._single, self._in_use = compare, single, in_use

    def is_faster(self, option: Option, other: Option) -> bool:
        return is_faster(option, other, self._compare)

    def in_order(self, options: Iterable[Option]) -> list[Option]:
        """Return the options in an order in which no option precedes one that is shown to be
        faster.

        The option in use precedes every option that is not shown to be faster than it.
        """
        preferred = sorted(options, key=lambda option: (*self._key(option), str(option.name)))
        used = next((option for option in preferred if option.name == self._in_use), None)
        if used is None:
            return self._sorted(preferred)
        ahead = [option for option in preferred if self.is_faster(option, used)]
        behind = [option for option in preferred if option not in (used, *ahead)]
        return [*self._sorted(ahead), used, *self._sorted(behind)]

    def _sorted(self, preferred: Iterable[Option]) -> list[Option]:
        """Return the options, the preferred first, in an order in which no option precedes one that
        is shown to be faster."""
        remaining, order = [*preferred], []
        while remaining:
            beaten = {
                option.name
                for option in remaining
                if any(self.is_faster(other, option) for other in remaining)
            }
            # paired measurements of different repetitions may contradict each other: all are beaten
            first = next((o for o in remaining if o.name not in beaten), remaining[0])
            remaining.remove(first)
            order.append(first)
        return order

    def _key(self, option: Option) -> tuple[float, ...]:
        """Return the values of `_CRITERIA`, which decide among options that are not told apart."""
        return (
            option.name != self._in_use,
            not option.measured,
            self._beats_single(option),
            not option.lossless,
            option.simplicity,
            option.devices,
            self.mean(option),
        )

    def mean(self, option: Option) -> float:
        """Return the mean time, infinite where it is unknown."""
        return math.inf if option.time is None else option.time.ratio

    def _beats_single(self, option: Option) -> int:
        """Return 0 where an option is shown to be faster than one device and than one node, 2 where
        it is shown to be slower than either, 1 otherwise."""
        if not self._single or option in self._single:
            return 1
        if all(self.is_faster(option, single) for single in self._single):
            return 0
        return 2 if any(self.is_faster(single, option) for single in self._single) else 1

    def reason(self, option: Option, order: Sequence[Option]) -> str:
        """Return the reason for the position of an option in the order."""
        first, *later = order
        if option is not first:
            if self.is_faster(first, option):
                longer = within(*self._compare(option, first), 2)
                return f"takes {longer} times as long as {first.title}"
            return f"not told apart from {first.title}, which {self._difference(first, option)}"
        tied = [other for other in later if not self.is_faster(first, other)]
        if not tied:
            return "shown to be the fastest" if later else "nothing else may be used"
        return f"not told apart from {tied[0].title}, but {self._difference(first, tied[0])}"

    def _difference(self, first: Option, other: Option) -> str:
        values = zip(_CRITERIA, self._key(first), self._key(other), strict=True)
        better = (criterion for criterion, value, second in values if value < second)
        return next(better, "is shown to be faster")
