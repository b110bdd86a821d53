"""Laws of the sequential test of a race; errors by simulation, a sample of `race_errors`."""

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import multivariate_normal

from benchmarks.race_errors import NOISES, RACES, RULE, false_accepts, log_ratios
from shardlab.config.race_record import BLOCK, Ruling
from shardlab.search.sequential import (
    RaceRule,
    boundary,
    centre,
    standing,
    standings_of,
    verdict,
)

SEARCHES = 400


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(15)


def at_most(share: float, count: int) -> float:
    """Four standard deviations above what a share of that size may show."""
    return share + 4 * math.sqrt(share * (1 - share) / count)


def steps(rng: np.random.Generator, *ratios: float, repetitions: int = RULE.most) -> dict:
    """Step times of an incumbent and challengers on a machine that drifts."""
    drift = rng.normal(0, 0.1, repetitions).cumsum()
    arms = ["incumbent", *(f"arm{number}" for number in range(len(ratios)))]
    return {
        arm: list(40 * ratio * np.exp(drift + rng.normal(0, 0.1, repetitions)))
        for arm, ratio in zip(arms, (1.0, *ratios), strict=True)
    }


def test_one_look_is_the_normal_quantile():
    assert boundary(0.025, (1.0,)) == pytest.approx((1.959964,), abs=1e-4)


def test_looks_together_spend_the_error(rng):
    """Five looks at a Brownian motion, of which a fifth of the error is spent at the first."""
    times = np.arange(1, 6) / 5
    limits = np.array(boundary(0.05, tuple(times)))
    paths = rng.normal(0, math.sqrt(0.2), (200_000, 5)).cumsum(axis=1) / np.sqrt(times)
    exceeds = paths > limits
    assert exceeds.any(axis=1).mean() == pytest.approx(0.05, abs=0.002)
    assert exceeds[:, 0].mean() == pytest.approx(0.01, abs=0.001)


def test_two_looks_spend_the_error_of_the_bivariate_normal():
    limits = boundary(0.05, (0.5, 1.0))
    both = multivariate_normal(cov=[[1, math.sqrt(0.5)], [math.sqrt(0.5), 1]])
    assert 1 - both.cdf(limits) == pytest.approx(0.05, abs=2e-5)


def test_the_error_is_that_of_yuen_and_negative_autocorrelation_is_not_believed():
    mean, error, freedom = centre(np.array([[1.0, 2.0] * 5]))
    assert (mean[0], freedom) == (1.5, 7)
    assert error[0] == pytest.approx(math.sqrt(10 * 0.5**2 / (8 * 7)))


@pytest.mark.parametrize("noise", ["normal", "heavy", "disturbed"])
def test_a_search_without_gains_accepts_nothing_in_95_percent(rng, noise):
    assert false_accepts(rng, noise, 0.2, SEARCHES) <= at_most(0.05, SEARCHES)


def test_slight_autocorrelation_is_allowed_for(rng):
    assert false_accepts(rng, "correlated 0.1", 0.2, SEARCHES) <= at_most(0.08, SEARCHES)


@pytest.mark.parametrize("noise", NOISES)
def test_a_gain_of_10_percent_is_accepted_in_90_percent(rng, noise):
    found = standings_of(log_ratios(rng, noise, 0.2, 0.1, 1000, 1)[:, 0], RULE)
    assert found.faster.mean() >= 0.9
    assert found.repetitions.mean() < 100


def test_challengers_without_gain_are_given_up(rng):
    slower = standings_of(log_ratios(rng, "normal", 0.2, -0.1, 1000, 1)[:, 0], RULE)
    assert slower.hopeless.mean() > 0.99
    assert slower.repetitions.mean() < 40
    equal = standings_of(log_ratios(rng, "normal", 0.2, 0, 1000, 1)[:, 0], RULE)
    assert equal.hopeless.mean() > 0.7


@pytest.mark.parametrize("noise", ["normal", "heavy", "disturbed", "correlated 0.1"])
@pytest.mark.parametrize("gain", [0.0, 0.05, 0.2])
def test_intervals_of_all_looks_hold_the_ratio(rng, noise, gain):
    found = standings_of(log_ratios(rng, noise, 0.2, gain, 2000, 1)[:, 0], RULE)
    assert (found.high < 1 - gain).mean() <= at_most(RULE.false_accept, 2000)
    missed = at_most(RULE.missed * (1.4 if noise.startswith("corr") else 1), 2000)
    assert (found.low > 1 - gain).mean() <= missed


def test_drift_of_the_machine_cancels(rng):
    drift = rng.normal(0, 1, RULE.most).cumsum()
    arms = steps(rng, 0.9)
    moved = {arm: list(times * np.exp(drift)) for arm, times in arms.items()}
    first, second = (verdict(each, "incumbent", RULE, 0) for each in (arms, moved))
    assert first.standings["arm0"].high == pytest.approx(second.standings["arm0"].high)
    assert first.standings["arm0"].verdict == second.standings["arm0"].verdict == "faster"


def test_a_few_stretched_steps_change_little(rng):
    arms = steps(rng, 0.85, repetitions=60)
    before = verdict(arms, "incumbent", RULE, 0).standings["arm0"]
    for number in range(5, 60, 20):
        arms["arm0"][number] *= 20
    after = verdict(arms, "incumbent", RULE, 0).standings["arm0"]
    assert after.ratio == pytest.approx(before.ratio, rel=0.03)
    assert before.verdict == after.verdict == "faster"


@given(st.integers(0, 2**32 - 1), st.floats(0.7, 1.3))
def test_a_decision_stays_and_intervals_shrink(seed, ratio):
    values = np.random.default_rng(seed).normal(math.log(ratio), 0.2, RULE.most)
    found = [standing(values[:look], RULE) for look in RULE.looks]
    for before, after in pairwise(found):
        if before.verdict != "open":
            assert (after.verdict, after.repetitions) == (before.verdict, before.repetitions)
        assert after.low >= min(before.low, after.high)
        assert after.high <= before.high
    for each in found:
        assert each.low <= each.ratio <= each.high
        assert (each.high < 1) >= (each.verdict == "faster")


@given(st.integers(0, 2**32 - 1))
def test_a_race_that_has_ended_stays_at_its_end(seed):
    arms = steps(np.random.default_rng(seed), 0.9, 1.0, 1.2)
    ended = False
    for look in RULE.looks:
        seen = {arm: times[:look] for arm, times in arms.items()}
        stop = verdict(seen, "incumbent", RULE, 0).ruling.stop
        assert stop is not None or not ended
        ended |= stop is not None
    assert ended


def test_an_arm_that_left_keeps_its_standing(rng):
    arms = steps(rng, 1.5, 0.97)
    look = {arm: times[:BLOCK] for arm, times in arms.items()}
    first = verdict(look, "incumbent", RULE, 0)
    assert first.ruling == Ruling(None, ("arm0",))
    arms["arm0"] = arms["arm0"][:BLOCK]
    later = verdict(arms, "incumbent", RULE, 0)
    assert later.standings["arm0"] == first.standings["arm0"]


def test_reasons_are_in_words(rng):
    def reason(arms: dict, seconds: float = 0, rule: RaceRule = RULE) -> str | None:
        return verdict(arms, "incumbent", rule, seconds).ruling.stop

    early = steps(rng, 0.99, repetitions=BLOCK)
    assert reason(early) is None
    assert reason(early, 61) == "60 s are over"
    assert reason(early, rule=RaceRule(0.01, most=BLOCK)) == f"all of {BLOCK} repetitions"
    assert reason(steps(rng, 0.7, 1.4)) == "every challenger is decided"
    apart = steps(rng, 0.3, 0.94, repetitions=2 * BLOCK)
    assert reason(apart) == "arm1 cannot become the fastest"
    assert reason({"incumbent": [1.0] * BLOCK}) == "no challenger is left"
    assert reason({"arm0": [1.0] * BLOCK}) == "the incumbent diverged"


def test_the_error_of_a_search_is_divided_among_its_challengers():
    assert RaceRule.of_search(24).false_accept == pytest.approx(0.05 / 24)
    assert RULE.false_accept * RACES * 3 == pytest.approx(0.05)
    assert RaceRule.of_search(2, most=25).looks == [10, 20, 25]
    with pytest.raises(ValueError, match="no complete block"):
        standing(np.zeros(BLOCK - 1), RULE)
    equal = standing(np.zeros(BLOCK), RULE)
    assert (equal.verdict, equal.ratio) == ("hopeless", 1.0)
