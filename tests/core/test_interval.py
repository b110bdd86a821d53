"""Ratios of timings that took turns, and of several timings."""

import math
import random

import pytest

from shardlab.core.interval import Ratio, enclosing, paired_ratio, ratio_in_turns

DRIFT = [20.0, 40.0, 25.0, 90.0]


def test_a_drift_cancels_between_timings_that_took_turns():
    assert ratio_in_turns([3 * step for step in DRIFT], DRIFT) == pytest.approx((3, 3, 3))
    often = [step for step in DRIFT for _ in range(5)]
    assert ratio_in_turns([3 * step for step in DRIFT], often) == pytest.approx((3, 3, 3))
    assert ratio_in_turns(often, [3 * step for step in DRIFT]) == pytest.approx([1 / 3] * 3)


def test_pairs_of_as_many_repetitions_are_those_of_one_timing():
    values, divisors = [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]
    assert ratio_in_turns(values, divisors) == pytest.approx(paired_ratio(values, divisors))


def test_numbers_without_a_common_turn_count_as_independent():
    chance = random.Random(0)
    values, divisors = ([chance.uniform(90, 110) for _ in range(count)] for count in (12, 40))
    ratio, low, high = ratio_in_turns(values, divisors)
    ends = [
        math.log(mean / one_low)
        for times in (values, divisors)
        for mean, one_low, _ in [paired_ratio(times, [1.0] * len(times))]
    ]
    assert math.log(ratio / low) == pytest.approx(math.hypot(*ends))
    assert math.log(high / ratio) == pytest.approx(math.hypot(*ends))


def test_what_is_no_measurement_is_left_out_of_a_ratio_in_turns():
    nan = math.nan
    assert ratio_in_turns([3.0, nan, 3.0], [1.0, 1.0, nan, 1.0, 1.0, 1.0]).ratio == pytest.approx(3)
    # neither number of the rest is a multiple of the other
    assert ratio_in_turns([3.0, nan, 3.0], [1.0, nan, 1.0, 1.0]).ratio == pytest.approx(3)


def test_a_chain_of_ratios_has_both_uncertainties():
    one, other = Ratio(2.0, 1.0, 4.0), Ratio(3.0, 3.0, 3.0)
    assert one.times(other) == pytest.approx((6, 3, 12))
    wide = one.times(one.inverse)
    assert wide == pytest.approx((1, 2 ** -math.sqrt(2), 2 ** math.sqrt(2)))


def test_several_timings_enclose_the_intervals_of_all():
    ratios = [Ratio(2.0, 1.8, 2.2), Ratio(8.0, 7.0, 9.0)]
    assert enclosing(ratios) == pytest.approx((4, 1.8, 9))
    assert enclosing(ratios[:1]) == pytest.approx(ratios[0])
    ratio, low, high = enclosing([*ratios, Ratio(2.0, math.nan, math.nan)])
    assert ratio == pytest.approx(32 ** (1 / 3)) and math.isnan(low) and math.isnan(high)
