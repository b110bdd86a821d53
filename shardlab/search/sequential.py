"""Sequential test of a race: which challengers are faster than the incumbent, after every block.

Every repetition gives a challenger one log ratio of its step time over the incumbent's; what both
share, such as the drift of the machine, cancels. The centre is the mean without the lowest and the
highest tenth, since other processes stretch single steps; its standard error is that of Yuen
(1974), widened by the autocorrelation of the ratios where that is positive.

After a block the interval of the ratio is the repeated confidence interval of Jennison and Turnbull
(1989): centre and standard error times a boundary, such that all intervals of a challenger hold
together. Its two ends have errors of their own. The upper one decides what is accepted, so its
error is the search's 5 % divided by all challengers that the search may race. The lower one only
ends hopeless races; its error is the chance to miss a useful gain.

The boundaries spend the error in proportion to the repetitions (Lan and DeMets 1983; Kim and DeMets
1987, power 1), and Student's t at the same probability allows for the standard error of few
repetitions. `python -m benchmarks.race_errors` shows errors and power, also of the asymptotic
confidence sequence of Waudby-Smith et al. (2024): that is too narrow at ten repetitions, and wider
than the boundaries once Student's t widens it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# not scipy.stats, whose import takes half a second
from scipy.special import ndtr, stdtrit

from shardlab.config.race_record import BLOCK, Ruling

SEARCH_ERROR = 0.05
"""chance that a search accepts any strategy that is not faster than its incumbent"""
_TRIMMED = 0.1
_GRID = 401
_FAR = 8.0
"""standard deviations beyond which a normal density is nothing"""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RaceRule:
    """Errors and limits of one race."""

    false_accept: float
    """of one challenger that is not faster"""
    missed: float = 0.05
    """chance to give up one challenger with a useful gain"""
    useful: float = 0.05
    """smallest gain worth racing for, relative"""
    most: int = 150
    """repetitions"""
    budget_s: float = 60.0
    """seconds, after which the next look ends the race"""

    @classmethod
    def of_search(cls, challengers: int, **limits: Any) -> "RaceRule":
        """Return the rule of each race of a search.

        Args:
            challengers: that all races of the search together may have.
        """
        return cls(SEARCH_ERROR / challengers, **limits)

    @property
    def looks(self) -> list[int]:
        """Numbers of repetitions after which it is applied."""
        return [*range(BLOCK, self.most, BLOCK), self.most]


class Standing(NamedTuple):
    """Challenger after the last look; ratios are of its step time over the incumbent's."""

    verdict: Literal["faster", "hopeless", "open"]
    """faster: the interval lies below 1; hopeless: above 1 - useful; the first of them stays"""
    ratio: float
    low: float
    high: float
    repetitions: int
    """at the look that decided; of an open one, at the last look"""


class Verdict(NamedTuple):
    """Race after a look."""

    standings: dict[str, Standing]
    """of the challengers"""
    ruling: Ruling


def verdict(
    step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule, seconds: float
) -> Verdict:
    """Apply the rule to the step times of a race.

    A pure function: more repetitions leave faster ones faster, hopeless ones hopeless and a race
    that has ended at its end.

    Args:
        step_ms: by arm, one per repetition; fewer for an arm that has left.
        seconds: since the race began.
    """
    if incumbent not in step_ms:
        return Verdict({}, Ruling("the incumbent diverged"))
    base = np.log(step_ms[incumbent])
    standings = {
        arm: standing(np.log(times) - base[: len(times)], rule)
        for arm, times in step_ms.items()
        if arm != incumbent
    }
    hopeless = tuple(arm for arm, each in standings.items() if each.verdict == "hopeless")
    return Verdict(standings, Ruling(_end(standings, len(base), rule, seconds), hopeless))


def _end(
    standings: Mapping[str, Standing], repetitions: int, rule: RaceRule, seconds: float
) -> str | None:
    """Return why the race ends, or None."""
    if not standings:
        return "no challenger is left"
    still = {arm: each for arm, each in standings.items() if each.verdict == "open"}
    if not still:
        return "every challenger is decided"
    best = min((each.high for each in standings.values() if each.verdict == "faster"), default=0.0)
    if all(each.low > best > 0 for each in still.values()):
        return f"{', '.join(still)} cannot become the fastest"
    if repetitions >= rule.most:
        return f"all of {rule.most} repetitions"
    if seconds >= rule.budget_s:
        return f"{rule.budget_s:g} s are over"
    return None


def standing(log_ratios: Array, rule: RaceRule) -> Standing:
    """Return the standing of one challenger; of its last incomplete block nothing counts.

    Raises:
        ValueError: there is no complete block.
    """
    found = standings_of(log_ratios[None], rule)
    return Standing(
        "faster" if found.faster[0] else "hopeless" if found.hopeless[0] else "open",
        float(found.ratio[0]),
        float(found.low[0]),
        float(found.high[0]),
        int(found.repetitions[0]),
    )


class Standings(NamedTuple):
    """Arrays over races: as in `Standing`."""

    faster: NDArray[np.bool_]
    hopeless: NDArray[np.bool_]
    ratio: Array
    low: Array
    high: Array
    repetitions: NDArray[np.int64]


def standings_of(log_ratios: Array, rule: RaceRule) -> Standings:
    """Return the standings of challengers of many races.

    Args:
        log_ratios: [races, repetitions].
    """
    races, repetitions = log_ratios.shape
    looks = [look for look in rule.looks if look <= repetitions]
    if not looks:
        raise ValueError(f"{repetitions} repetitions are no complete block of {BLOCK}")
    fractions = tuple(look / rule.most for look in rule.looks)
    upper, lower = (boundary(error, fractions) for error in (rule.false_accept, rule.missed))
    faster, hopeless = np.zeros((2, races), bool)
    # all intervals hold together, so their intersection does
    low, high, ratio = np.zeros(races), np.full(races, np.inf), np.ones(races)
    decided = np.full(races, looks[-1])
    for number, look in enumerate(looks):
        mean, error, freedom = centre(log_ratios[:, :look])
        on = ~hopeless  # it leaves, a faster one stays in the race
        ratio[on] = np.exp(mean[on])
        below, above = (stdtrit(freedom, ndtr(each[number])) for each in (lower, upper))
        low[on] = np.maximum(low, np.exp(mean - below * error))[on]
        high[on] = np.minimum(high, np.exp(mean + above * error))[on]
        new = on & ~faster & ((high < 1) | (low > 1 - rule.useful))
        decided[new] = look
        faster |= new & (high < 1)
        hopeless |= new & ~faster
    low = np.minimum(low, high)
    # of the last look, where the intervals of all say that it can be
    return Standings(faster, hopeless, np.clip(ratio, low, high), low, high, decided)


def centre(values: Array) -> tuple[Array, Array, int]:
    """Return trimmed means, their standard errors and the degrees of freedom.

    Args:
        values: [races, repetitions].
    """
    count = values.shape[1]
    cut = int(_TRIMMED * count)
    ordered = np.sort(values, axis=1)
    kept = count - 2 * cut
    near = np.clip(values, ordered[:, cut, None], ordered[:, count - 1 - cut, None])
    near -= near.mean(axis=1, keepdims=True)
    squares = np.maximum((near * near).sum(axis=1), np.finfo(float).tiny)
    following = (near[:, 1:] * near[:, :-1]).sum(axis=1) / squares
    # of an AR(1) process; less than none is not believed
    widened = (1 + np.clip(following, 0, 0.9)) / (1 - np.clip(following, 0, 0.9))
    error = np.sqrt(widened * squares / (kept * (kept - 1)))
    return ordered[:, cut : count - cut].mean(axis=1), error, kept - 1


@lru_cache
def boundary(error: float, fractions: tuple[float, ...]) -> tuple[float, ...]:
    """Return z such that a Brownian motion exceeds z * sqrt(t) at any of the times t by `error`.

    The error spent until t is `error * t`. By the recursion of Armitage, McPherson and Rowe (1969),
    on a grid.

    Args:
        fractions: rising times, the last is 1.
    """
    found: list[float] = []
    at, mass, before = np.zeros(1), np.ones(1), 0.0
    for time in fractions:
        step, spent = math.sqrt(time - before), error * (time - before)
        reach = _FAR * math.sqrt(time)
        low, high = 0.0, reach
        for _ in range(50):
            middle = (low + high) / 2
            exceeds = float(mass @ ndtr((at - middle) / step))
            low, high = (middle, high) if exceeds > spent else (low, middle)
        found.append(high / math.sqrt(time))
        grid = np.linspace(-reach, high, _GRID)
        width = np.full(_GRID, grid[1] - grid[0])
        width[[0, -1]] /= 2
        density = np.exp(-(((grid[:, None] - at) / step) ** 2) / 2) / (
            step * math.sqrt(2 * math.pi)
        )
        at, mass, before = grid, (density @ mass) * width, time
    return tuple(found)
