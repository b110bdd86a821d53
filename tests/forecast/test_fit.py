import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.forecast.machine import fit_line

SIZES = [2.0**n for n in range(12, 23, 2)]


@given(st.floats(1e-6, 1e-1), st.floats(1e-12, 1e-6))
def test_a_straight_line_is_found_again(alpha, beta):
    line = fit_line(SIZES, [alpha + beta * size for size in SIZES])
    for size in SIZES:
        assert line.at(size) == pytest.approx(alpha + beta * size, rel=1e-6)
    half = line.intervals()
    assert abs(line.alpha - alpha) <= half[0] + 1e-6 * line.at(SIZES[0])
    assert abs(line.beta - beta) <= half[1] + 1e-6 * line.at(SIZES[-1]) / SIZES[-1]


def test_intervals_hold_the_truth_as_often_as_they_say():
    alpha, beta, draws = 2e-4, 1e-9, 400
    chance = np.random.default_rng(0)
    hits = np.zeros(2)
    for _ in range(draws):
        seconds = [(alpha + beta * n) * (1 + 0.05 * chance.standard_normal()) for n in SIZES]
        line = fit_line(SIZES, seconds)
        a, b = line.intervals()
        hits += [abs(line.alpha - alpha) <= a, abs(line.beta - beta) <= b]
    # 95 % and three standard deviations of 400 draws below
    assert (hits / draws > 0.917).all()


def test_neither_part_is_negative():
    line = fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert 0 <= line.beta < 1e-9
    assert 0 <= fit_line([1.0, 2.0, 4.0], [0.1, 1.2, 3.1]).alpha < 1e-9


def test_small_and_large_operations_count_alike():
    """One tenth more at the smallest size moves the fit there by more than half of it."""
    seconds = [1e-4 + 1e-9 * size for size in SIZES]
    line = fit_line(SIZES, [1.1 * seconds[0], *seconds[1:]])
    assert line.at(SIZES[0]) > 1.02 * seconds[0]
    assert line.at(SIZES[-1]) == pytest.approx(seconds[-1], rel=0.01)
