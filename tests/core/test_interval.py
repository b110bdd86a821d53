"""The interval of comparisons: known answers of Student's t."""

import math

import pytest

from shardlab.core.interval import interval_factor, paired_ratio


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
    alone = paired_ratio([6.0], [3.0])
    assert alone.ratio == pytest.approx(2) and math.isnan(alone.low) and math.isnan(alone.high)
