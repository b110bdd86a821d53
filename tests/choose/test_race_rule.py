"""Laws of the rule of a race, and its errors by simulation."""

import math
from itertools import pairwise

import numpy as np
import pytest

from shardlab.choose.race_rule import (
    MISSED,
    SEARCH_ERROR,
    RaceRule,
    compare_steps,
    decide_race,
    intervals,
)
from shardlab.results.table import StepRatio
from shardlab.results.timing_result import BLOCK

RACES, CHALLENGERS = 8, 4
RULE = RaceRule.of(RACES, 120)
NOISES = ("normal", "heavy", "disturbed", "correlated")


def log_ratios(rng, noise, races, gain=0.0, sd=0.2):
    """Log steps of challengers over those of the incumbent that they share: [races, challengers,
    repetitions]. Disturbed: other processes stretch a tenth of all steps."""
    shape, sd = (races, 1 + CHALLENGERS, RULE.repetitions), sd / math.sqrt(2)
    steps = sd * (rng.standard_t(3, shape) / 3**0.5 if noise == "heavy" else rng.normal(size=shape))
    if noise == "disturbed":
        steps += np.log1p((rng.random(shape) < 0.1) * rng.exponential(1, shape))
    if noise == "correlated":
        for k in range(1, shape[-1]):
            steps[..., k] = 0.2 * steps[..., k - 1] + 0.96**0.5 * steps[..., k]
    return steps[:, 1:] - steps[:, :1] + math.log1p(-gain)


@pytest.mark.parametrize("noise", NOISES)
def test_at_most_5_percent_of_searches_accept_what_is_not_faster(noise):
    searches = 400
    ratios = log_ratios(np.random.default_rng(0), noise, searches * RACES)
    faster = intervals(ratios, RULE).faster.reshape(searches, -1).any(axis=1)
    # two standard errors of the simulation
    assert faster.mean() <= SEARCH_ERROR + 2 * math.sqrt(0.05 * 0.95 / searches)


@pytest.mark.parametrize("noise", NOISES)
def test_a_gain_of_20_percent_is_accepted_and_one_of_5_percent_is_hardly_given_up(noise):
    rng = np.random.default_rng(1)
    assert intervals(log_ratios(rng, noise, 200, 0.2), RULE).faster.mean() > 0.95
    assert intervals(log_ratios(rng, noise, 200, 0.05), RULE).hopeless.mean() <= 0.06


def test_intervals_hold_the_true_ratio_at_all_looks_together():
    steps = intervals(log_ratios(np.random.default_rng(2), "normal", 500, 0.1), RULE)
    assert (steps.high < 0.9).mean() <= RULE.false_accept + 0.002
    assert (steps.low > 0.9).mean() <= MISSED
    assert np.all((steps.low <= steps.ratio) & (steps.ratio <= steps.high))


@pytest.mark.parametrize("noise", NOISES)
def test_what_a_look_has_ruled_out_stays_so(noise):
    """The interval is the intersection of those of all looks so far."""
    ratios = log_ratios(np.random.default_rng(4), noise, 50)
    looks = [intervals(ratios[..., :look], RULE) for look in RULE.looks]
    for earlier, later in pairwise(looks):
        assert np.all(later.high <= earlier.high)
        crossed = later.high < earlier.low
        assert np.all((later.low >= earlier.low) | crossed)


def steps(**ratios: float) -> dict[str, list[float]]:
    """Steps of arms whose ratios to the incumbent vary by some percent."""
    wobble = [1 + 0.04 * (5 * k % 7 - 3) for k in range(20)]
    times = {"held": [10 * (1 + 0.01 * (k % 3)) for k in range(20)]}
    return times | {arm: [10 * ratio * w for w in wobble] for arm, ratio in ratios.items()}


@pytest.mark.parametrize(
    ("ratios", "repetitions", "stop", "leave"),
    [
        ({"fast": 0.5, "slow": 2.0}, 40, "every challenger is decided", ("slow",)),
        ({"even": 0.97}, 40, None, ()),
        ({"even": 0.97}, 20, "all of 20 repetitions", ()),
        ({"fast": 0.3, "even": 0.97}, 40, "even cannot become the fastest", ()),
        ({}, 40, "no challenger is left", ()),
    ],
)
def test_a_race_ends_when_nothing_more_can_be_learnt(ratios, repetitions, stop, leave):
    rule = RaceRule(0.01, repetitions)
    assert decide_race(steps(**ratios), "held", rule) == (stop, leave)
    assert decide_race({"other": [1.0] * 20}, "held", rule).stop == "the incumbent diverged"


def test_an_arm_that_left_is_compared_over_the_steps_that_it_has():
    times = steps(slow=2.0)
    step = compare_steps({**times, "slow": times["slow"][:BLOCK]}, "held", RULE)["slow"]
    assert step.hopeless and step.repetitions == BLOCK
    assert step.ratio == pytest.approx(2.0, rel=0.03)


def test_an_interval_of_too_few_repetitions_is_not_shown_in_figures():
    """Two blocks leave one degree of freedom: at the error of a race Student's t is over 100."""
    noise = np.random.default_rng(3).normal(0, 0.3, 120)
    setting = {"source": "round 1", "link": "loopback", "world_size": 2}
    shown = {}
    for repetitions in BLOCK, 120:
        rule = RaceRule.of(RACES, repetitions)
        figures = intervals(noise[:repetitions], rule).figures()
        shown[repetitions] = StepRatio(**setting, **figures)
    few, many = shown.values()
    assert few.high > 1000 * few.ratio
    assert few.interval == "interval too wide to tell"
    assert many.interval == f"{many.low:.3f} to {many.high:.3f}"
    assert few.model_copy(update={"low": math.nan, "high": math.nan}).interval == few.interval
