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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# not scipy.stats, whose import takes half a second
from scipy.special import stdtrit

from shardlab.config.schema import Agent
from shardlab.config.timing_record import BLOCK, Ruling

SEARCH_ERROR = 0.05
"""chance that a search accepts any strategy that is not faster than its incumbent"""
MISSED = 0.05
"""chance to give up one challenger with a useful gain"""
USEFUL = 0.05
"""smallest gain worth racing for, relative"""
_LARGEST_RACE = 4
"""challengers: the start, the judge's choice, the forecast's and a random one"""

Array = NDArray[np.float64]


@dataclass(frozen=True)
class RaceRule:
    """Errors and limits of one race."""

    false_accept: float
    """of one challenger that is not faster"""
    repetitions: int
    """at most"""
    budget_s: float
    """seconds, after which the next look ends the race"""

    @classmethod
    def of(cls, agent: Agent) -> "RaceRule":
        """Return the rule of each race, such that its errors hold over the whole search."""
        # traces follow the steps, and a race without one arm may have to begin again
        budget_s = agent.trial_timeout_s / 2
        return cls(SEARCH_ERROR / (_LARGEST_RACE * agent.budget), agent.repetitions, budget_s)

    @property
    def looks(self) -> list[int]:
        """Numbers of repetitions after which the intervals are computed."""
        doubled = [BLOCK * 2**power for power in range(self.repetitions.bit_length())]
        return [*(look for look in doubled if look < self.repetitions), self.repetitions]


class Standing(NamedTuple):
    """Challenger after the last look, or arrays of several; the first verdict stays."""

    faster: NDArray[np.bool_]
    """whether the interval lies below 1"""
    hopeless: NDArray[np.bool_]
    """whether it lies above 1 - `USEFUL`"""
    ratio: Array
    """of step times over the incumbent's"""
    low: Array
    high: Array
    repetitions: int
    """at the last look"""


def standings(
    step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule
) -> dict[str, Standing]:
    """Return how each challenger stands, by arm; none where the incumbent has no steps.

    More repetitions leave faster ones faster and hopeless ones hopeless.

    Args:
        step_ms: one per repetition, by arm; fewer for an arm that has left.
    """
    logs = {arm: np.log(times) for arm, times in step_ms.items()}
    held = logs.pop(incumbent, None)
    if held is None:
        return {}
    return {arm: intervals(times - held[: len(times)], rule) for arm, times in logs.items()}


def ruling(
    step_ms: Mapping[str, Sequence[float]], incumbent: str, rule: RaceRule, seconds: float
) -> Ruling:
    """Return whether a race ends, and which challengers leave it.

    Args:
        step_ms: of `standings`.
        seconds: since the race began.
    """
    if incumbent not in step_ms:
        return Ruling("the incumbent diverged")
    known, repetitions = standings(step_ms, incumbent, rule), len(step_ms[incumbent])
    hopeless = tuple(arm for arm, state in known.items() if state.hopeless)
    fastest = min((float(s.high) for s in known.values() if s.faster), default=0.0)
    still = {arm: s for arm, s in known.items() if not s.faster and not s.hopeless}
    if not known:
        return Ruling("no challenger is left")
    if not still:
        return Ruling("every challenger is decided", hopeless)
    if all(float(state.low) > fastest > 0 for state in still.values()):
        return Ruling(f"{', '.join(still)} cannot become the fastest", hopeless)
    if repetitions >= rule.repetitions:
        return Ruling(f"all of {rule.repetitions} repetitions", hopeless)
    if seconds >= rule.budget_s:
        return Ruling(f"{rule.budget_s:g} s are over", hopeless)
    return Ruling(None, hopeless)


def intervals(log_ratios: Array, rule: RaceRule) -> Standing:
    """Return the intervals after the last complete look.

    Args:
        log_ratios: [..., repetitions], at least `BLOCK` of them.
    """
    looks = [look for look in rule.looks if look <= log_ratios.shape[-1]]
    shape = log_ratios.shape[:-1]
    faster, hopeless = np.zeros(shape, bool), np.zeros(shape, bool)
    low, high, mean = np.zeros(shape), np.full(shape, np.inf), np.zeros(shape)
    for look in looks:
        values = block_means(log_ratios[..., :look])
        count = values.shape[-1]
        mean = values.mean(axis=-1)
        error = values.std(axis=-1, ddof=1) / math.sqrt(count)
        upper, lower = (
            stdtrit(count - 1, 1 - chance / len(rule.looks))
            for chance in (rule.false_accept, MISSED)
        )
        low = np.maximum(low, np.exp(np.clip(mean - lower * error, -700, 700)))
        high = np.minimum(high, np.exp(np.clip(mean + upper * error, -700, 700)))
        faster |= ~hopeless & (high < 1)
        hopeless |= ~faster & (low > 1 - USEFUL)
    low = np.minimum(low, high)
    ratio = np.clip(np.exp(mean), low, high)
    return Standing(faster, hopeless, ratio, low, high, looks[-1])


def block_means(log_ratios: Array) -> Array:
    """Return the mean of the middle three of every five repetitions; an incomplete block is left
    out."""
    shape, count = log_ratios.shape[:-1], log_ratios.shape[-1] // 5
    blocks = log_ratios[..., : 5 * count].reshape(*shape, count, 5)
    return np.asarray(np.sort(blocks, axis=-1)[..., 1:4].mean(axis=-1))
