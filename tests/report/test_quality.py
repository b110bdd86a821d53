"""Steps to quality and quality at a time of training curves."""

import math

import pytest

from shardlab.report.quality import (
    quality_at_time,
    smoothed,
    steps_to_quality,
)


def test_smoothing_averages_over_a_twentieth_of_the_steps():
    assert [*smoothed([3.0, 1.0, 2.0])] == [3.0, 1.0, 2.0]
    assert [*smoothed([5.0 + (-1) ** step for step in range(80)])][3:] == [5.0] * 77
    # a loss that is not finite affects its window only
    curve = smoothed([1.0] * 10 + [math.nan] + [1.0] * 29)
    assert [step for step, loss in enumerate(curve) if math.isnan(loss)] == [10, 11]


def test_steps_to_quality_are_interpolated_and_the_first_crossing_counts():
    for threshold, steps in ((6.0, 1), (4.0, 2), (3.5, 2.5), (2.0, 4)):
        assert steps_to_quality([5.0, 4.0, 3.0, 2.0], threshold) == steps
    assert steps_to_quality([5.0, 2.0, 5.0, 1.0], 2.0) == 2.0


@pytest.mark.parametrize("losses", [[5.0, 4.0], [math.nan, math.nan], []])
def test_unreached_threshold_is_none(losses):
    assert steps_to_quality(losses, 3.9) is None


def test_quality_at_time_is_that_of_the_last_completed_step():
    losses, times = [5.0, 4.0, 3.0], [10.0, 20.0, 30.0]
    assert quality_at_time(losses, times, 9.9) is None
    assert quality_at_time(losses, times, 20.0) == 4.0
    assert quality_at_time(losses, times, 1000.0) == 3.0
