"""Intervals of comparisons: Student's t, timings that took turns, and several timings."""

import math

import pytest

from shardlab.results.interval import (
    Ratio,
    enclosing,
    geometric_mean,
    interleaved_ratio,
    interval_factor,
    paired_ratio,
    pauses,
)

DRIFT = [20.0, 40.0, 25.0, 90.0]


def test_half_the_width_is_students_t_over_the_root_of_the_count() -> None:
    """By the tables: 12.706 of one degree of freedom, 4.303 of two, 2.262 of nine."""
    for count, t in ((2, 12.706), (3, 4.303), (10, 2.262)):
        assert interval_factor(count) == pytest.approx(t / math.sqrt(count), rel=1e-3)
    assert math.isnan(interval_factor(1))


def test_ratios_have_the_sample_deviation_of_their_logarithms() -> None:
    """Logarithms 1, 2 and 3: mean 2, sample deviation 1, half-width 4.303 over the root of 3."""
    ratio = paired_ratio([math.e * 7, math.e**2 * 5, math.e**3], [7.0, 5.0, 1.0])
    half = 4.3027 / math.sqrt(3)
    assert [math.log(x) for x in ratio] == pytest.approx([2, 2 - half, 2 + half], rel=1e-4)
    single = paired_ratio([6.0], [3.0])
    assert single.ratio == pytest.approx(2) and math.isnan(single.low) and math.isnan(single.high)


def test_pairs_without_a_measurement_are_left_out() -> None:
    nan = math.nan
    assert paired_ratio([6.0, nan, 9.0, 8.0], [2.0, 1.0, 3.0, nan]) == pytest.approx([3.0] * 3)
    assert all(map(math.isnan, paired_ratio([nan, 1.0], [1.0, nan])))
    assert geometric_mean([2.0, nan, 8.0]).ratio == pytest.approx(4)


def test_a_drift_cancels_between_timings_that_took_turns():
    assert interleaved_ratio([3 * step for step in DRIFT], DRIFT) == pytest.approx((3, 3, 3))
    often = [step for step in DRIFT for _ in range(5)]
    assert interleaved_ratio([3 * step for step in DRIFT], often) == pytest.approx((3, 3, 3))
    assert interleaved_ratio(often, [3 * step for step in DRIFT]) == pytest.approx([1 / 3] * 3)


def test_pairs_of_as_many_repetitions_are_those_of_one_timing():
    values, divisors = [1.0, 2.0, 4.0], [2.0, 2.0, 2.0]
    assert interleaved_ratio(values, divisors) == pytest.approx(paired_ratio(values, divisors))


@pytest.mark.parametrize(("count", "divisors"), [(20, 21), (21, 20), (12, 40), (7, 40), (2, 3)])
def test_timings_of_any_two_numbers_have_an_interval(count, divisors):
    assert interleaved_ratio([3.0] * count, [1.0] * divisors) == pytest.approx((3, 3, 3))


def test_of_other_numbers_blocks_are_as_equal_as_can_be():
    """Blocks of 1, 1 and 2: the ratios are 2, 2 and 8 / sqrt(4 * 4)."""
    assert interleaved_ratio([4.0, 4.0, 8.0], [2.0, 2.0, 2.0, 8.0]) == pytest.approx((2, 2, 2))
    values, divisors = [4.0, 9.0, 8.0], [2.0, 3.0, 2.0, 8.0]
    expected = paired_ratio([2.0, 3.0, 2.0], [1.0] * 3)
    assert interleaved_ratio(values, divisors) == pytest.approx(expected)


def test_a_single_pair_has_no_interval():
    ratio, low, high = interleaved_ratio([3.0], [1.0] * 40)
    assert ratio == pytest.approx(3)
    assert math.isnan(low) and math.isnan(high)


def test_an_interleaved_ratio_leaves_out_nan():
    nan, values = math.nan, [3.0, math.nan, 3.0]
    assert interleaved_ratio(values, [1.0, 1.0, nan, 1.0, 1.0, 1.0]).ratio == pytest.approx(3)
    assert interleaved_ratio(values, [1.0, nan, 1.0, 1.0]).ratio == pytest.approx(3)


def test_a_chain_of_ratios_has_both_uncertainties():
    first, second = Ratio(2.0, 1.0, 4.0), Ratio(3.0, 3.0, 3.0)
    assert first.times(second) == pytest.approx((6, 3, 12))
    wide = first.times(first.inverse)
    assert wide == pytest.approx((1, 2 ** -math.sqrt(2), 2 ** math.sqrt(2)))


def test_a_quotient_has_both_uncertainties_and_is_below_1_one_way_alone():
    wide = Ratio(2.0, 1.0, 4.0)
    assert wide.over(wide) == pytest.approx((1, 2 ** -math.sqrt(2), 2 ** math.sqrt(2)))
    assert wide.over(Ratio(3.0, 3.0, 3.0)) == pytest.approx((2 / 3, 1 / 3, 4 / 3))
    # the logarithm of its inverse is rounded otherwise than its own
    for value in (4.331024060091071, 3.0, 0.1, 49.0):
        exact = Ratio(value, value, value)
        assert exact.over(exact) == (1, 1, 1)


def test_several_timings_enclose_the_intervals_of_all():
    ratios = [Ratio(2.0, 1.8, 2.2), Ratio(8.0, 7.0, 9.0)]
    assert enclosing(ratios) == pytest.approx((4, 1.8, 9))
    assert enclosing(ratios[:1]) == pytest.approx(ratios[0])
    ratio, low, high = enclosing([*ratios, Ratio(2.0, math.nan, math.nan)])
    assert ratio == pytest.approx(32 ** (1 / 3)) and math.isnan(low) and math.isnan(high)


def test_several_repetitions_in_one_turn_count_by_their_geometric_mean():
    assert interleaved_ratio([4.0, 4.0], [2.0, 8.0, 1.0, 16.0]) == pytest.approx((1, 1, 1))


def test_a_pause_is_over_twice_the_median_and_far_beyond_the_spread():
    steady = [10.0] * 9
    assert pauses([*steady, 19.0, 21.0]) == [False] * 10 + [True]
    # median 20, of whose distances the median is 10: ten deviations end at 168
    noisy = [10.0, 20.0, 5.0, 30.0, 8.0, 25.0]
    assert pauses([*noisy, 160.0]) == [False] * 7
    assert pauses([*noisy, 180.0]) == [False] * 6 + [True]
