"""Rule of a race: which challengers have shorter steps than the incumbent.

Every repetition gives a challenger one log ratio of its step time over the incumbent's; whatever
slows both down, such as the drift of the machine, cancels. Five repetitions are a block. The value
of a block is the mean of its middle three ratios, since other processes stretch single steps.
Blocks, in place of steps, are averaged because steps that follow each other are correlated.

A look at the race comes after 10, 20, 40, ... repetitions and after the last one. It computes
Student's interval of the mean over blocks. The error of each end is divided by the number of looks
(Bonferroni), so that all intervals of a challenger, and their intersection, are valid at once. The
upper end decides what is accepted, so its error is the search's 5 % divided by the number of all
challengers that the search may race. The lower end only gives challengers up, so its error is the
chance to miss a useful gain.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# not scipy.stats, whose import takes half a second
from scipy.special import stdtrit

from shardlab.results.timing_result import BLOCK, RaceDecision

SEARCH_ERROR = 0.05
"""Chance that a search accepts any strategy that is not faster than its incumbent."""
MISSED = 0.05
"""Chance to give up one challenger with a useful gain."""
USEFUL = 0.05
"""Smallest relative gain that is worth a race."""
_LARGEST_RACE = 4
"""Maximum number of challengers: the start, the judge's choice, the forecast's and a random one."""

_BLOCK_SIZE = 5
"""Repetitions of a block; its middle three count."""

Array = NDArray[np.float64]


class RaceRule(NamedTuple):
    """Error and length of one race."""

    false_accept: float
    """Chance to accept one challenger that is not faster."""
    repetitions: int
    """Maximum number of repetitions."""

    @classmethod
    def of(cls, budget: int, repetitions: int) -> "RaceRule":
        """Return the rule of each race that keeps the error of the search at `SEARCH_ERROR`.

        Args:
            budget: maximum number of races of the search.
        """
        return cls(SEARCH_ERROR / (_LARGEST_RACE * budget), repetitions)

    @property
    def looks(self) -> list[int]:
        """Numbers of repetitions after which the intervals are computed."""
        doubled = [BLOCK * 2**power for power in range(self.repetitions.bit_length())]
        return [*(look for look in doubled if look < self.repetitions), self.repetitions]


class StepComparison(NamedTuple):
    """Step of a challenger over the incumbent's at the last look; or arrays, for several."""

    ratio: Array
    low: Array
    high: Array
    repetitions: int
    """Number of repetitions at the last look."""

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


def compare_steps(
    step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule
) -> dict[str, StepComparison]:
    """Return the comparison of each challenger with the incumbent, by arm; empty where the
    incumbent has no steps.

    Args:
        step_ms: step times by arm, one per repetition; fewer for an arm that has left.
    """
    logs = {arm: np.log(times) for arm, times in step_ms.items()}
    baseline = logs.pop(incumbent, None)
    if baseline is None:
        return {}
    return {arm: intervals(times - baseline[: len(times)], rule) for arm, times in logs.items()}


def decide_race(
    step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule
) -> RaceDecision:
    """Return whether a race ends, and which challengers leave it.

    Args:
        step_ms: as in `compare_steps`.
    """
    if incumbent not in step_ms:
        return RaceDecision("the incumbent diverged")
    steps = compare_steps(step_ms, incumbent, rule)
    hopeless = tuple(arm for arm, step in steps.items() if step.hopeless)
    fastest = min((float(step.high) for step in steps.values() if step.faster), default=0.0)
    undecided = {arm: step for arm, step in steps.items() if not step.faster and not step.hopeless}
    if not steps:
        return RaceDecision("no challenger is left")
    if not undecided:
        return RaceDecision("every challenger is decided", hopeless)
    if all(float(step.low) > fastest > 0 for step in undecided.values()):
        return RaceDecision(f"{', '.join(undecided)} cannot become the fastest", hopeless)
    if len(step_ms[incumbent]) >= rule.repetitions:
        return RaceDecision(f"all of {rule.repetitions} repetitions", hopeless)
    return RaceDecision(None, hopeless)


def intervals(log_ratios: Array, rule: RaceRule) -> StepComparison:
    """Return the intersection of the intervals of all looks until the last complete one.

    Args:
        log_ratios: [..., repetitions], with at least `BLOCK` repetitions.
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
    return StepComparison(np.exp(ratio), np.exp(low), np.exp(high), looks[-1])
