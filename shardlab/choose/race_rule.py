"""Rule of a race: which challengers have shorter steps than the incumbent.

Every repetition gives a challenger one log ratio of its step time over the incumbent's; what both
share, such as the drift of the machine, cancels. Five repetitions are a block, whose value is the
mean of its middle three ratios: other processes stretch single steps, and neighbours in time
resemble each other.

After 10, 20, 40, ... repetitions and after the last one, Student's interval of the mean over blocks
is computed. The error of each end is divided by the number of these looks (Bonferroni), so that all
intervals of a challenger hold together, with their intersection. The upper end decides what is
accepted, so its error is the search's 5 % divided by all challengers that the search may race. The
lower end only gives challengers up; its error is the chance to miss a useful gain.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# not scipy.stats, whose import takes half a second
from scipy.special import stdtrit

from shardlab.results.timing_result import BLOCK, Ruling

SEARCH_ERROR = 0.05
"""chance that a search accepts any strategy that is not faster than its incumbent"""
MISSED = 0.05
"""chance to give up one challenger with a useful gain"""
USEFUL = 0.05
"""smallest gain worth racing for, relative"""
_LARGEST_RACE = 4
"""challengers: the start, the judge's choice, the forecast's and a random one"""

_BLOCK_SIZE = 5
"""repetitions, of which the middle three count"""

Array = NDArray[np.float64]


class RaceRule(NamedTuple):
    """Error and length of one race."""

    false_accept: float
    """chance to accept one challenger that is not faster"""
    repetitions: int
    """at most"""

    @classmethod
    def of(cls, budget: int, repetitions: int) -> "RaceRule":
        """Return the rule of each race, such that its error holds over the whole search.

        Args:
            budget: races of the search at most.
        """
        return cls(SEARCH_ERROR / (_LARGEST_RACE * budget), repetitions)

    @property
    def looks(self) -> list[int]:
        """Numbers of repetitions after which the intervals are computed."""
        doubled = [BLOCK * 2**power for power in range(self.repetitions.bit_length())]
        return [*(look for look in doubled if look < self.repetitions), self.repetitions]


class Standing(NamedTuple):
    """Challenger after the last look, or arrays of several."""

    ratio: Array
    """of step times over the incumbent's"""
    low: Array
    high: Array
    repetitions: int
    """at the last look"""

    @property
    def faster(self) -> Any:
        """Whether the interval lies below 1."""
        return self.high < 1

    @property
    def hopeless(self) -> Any:
        """Whether the interval lies above 1 - `USEFUL`, but not below 1."""
        return (self.high >= 1) & (self.low > 1 - USEFUL)

    def figures(self) -> dict[str, Any]:
        """Return the figures of one challenger as plain numbers."""
        ratio, low, high = map(float, self[:3])
        return {"ratio": ratio, "low": low, "high": high, "repetitions": self.repetitions}


def standings(
    step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule
) -> dict[str, Standing]:
    """Return how each challenger stands, by arm; none where the incumbent has no steps.

    Args:
        step_ms: one per repetition, by arm; fewer for an arm that has left.
    """
    logs = {arm: np.log(times) for arm, times in step_ms.items()}
    held = logs.pop(incumbent, None)
    if held is None:
        return {}
    return {arm: intervals(times - held[: len(times)], rule) for arm, times in logs.items()}


def ruling(step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule) -> Ruling:
    """Return whether a race ends, and which challengers leave it.

    Args:
        step_ms: of `standings`.
    """
    if incumbent not in step_ms:
        return Ruling("the incumbent diverged")
    known = standings(step_ms, incumbent, rule)
    hopeless = tuple(arm for arm, state in known.items() if state.hopeless)
    fastest = min((float(s.high) for s in known.values() if s.faster), default=0.0)
    still = {arm: s for arm, s in known.items() if not s.faster and not s.hopeless}
    if not known:
        return Ruling("no challenger is left")
    if not still:
        return Ruling("every challenger is decided", hopeless)
    if all(float(state.low) > fastest > 0 for state in still.values()):
        return Ruling(f"{', '.join(still)} cannot become the fastest", hopeless)
    if len(step_ms[incumbent]) >= rule.repetitions:
        return Ruling(f"all of {rule.repetitions} repetitions", hopeless)
    return Ruling(None, hopeless)


def intervals(log_ratios: Array, rule: RaceRule) -> Standing:
    """Return the intersection of the intervals of all looks until the last complete one.

    Args:
        log_ratios: [..., repetitions], at least `BLOCK` of them.
    """
    looks = [look for look in rule.looks if look <= log_ratios.shape[-1]]
    shape = log_ratios.shape[:-1]
    low, high, mean = np.full(shape, -700.0), np.full(shape, 700.0), np.zeros(shape)
    for look in looks:
        blocks = log_ratios[..., : look - look % _BLOCK_SIZE].reshape(*shape, -1, _BLOCK_SIZE)
        values = np.sort(blocks, axis=-1)[..., 1:-1].mean(axis=-1)
        count = values.shape[-1]
        mean = values.mean(axis=-1)
        error = values.std(axis=-1, ddof=1) / math.sqrt(count)
        upper, lower = (
            stdtrit(count - 1, 1 - chance / len(rule.looks))
            for chance in (rule.false_accept, MISSED)
        )
        low = np.maximum(low, mean - lower * error)
        high = np.minimum(high, mean + upper * error)
    low = np.minimum(low, high)
    ratio = np.clip(mean, low, high)
    return Standing(np.exp(ratio), np.exp(low), np.exp(high), looks[-1])
