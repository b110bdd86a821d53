"""Paired comparison of runs: what all runs of a row have in common cancels."""

import math

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.report.aggregate import paired_difference, paired_ratio, verdict

positive = st.floats(0.01, 1e6)


def test_paired_difference_by_hand():
    values = pd.DataFrame({"base": [9.0, 10.0, 12.5], "other": [10.0, 12.0, 14.0]})
    found = paired_difference(values, "base").loc["other"]
    # differences 1, 2, 1.5: mean 1.5, deviation 0.5; t(0.975, 2) = 4.302653 from printed tables
    half = 4.302653 * 0.5 / math.sqrt(3)
    assert found["mean"] == 1.5
    assert found["low"] == pytest.approx(1.5 - half, rel=1e-6)
    assert found["high"] == pytest.approx(1.5 + half, rel=1e-6)


def test_pairs_are_taken_seed_by_seed():
    """A shift common to all seeds has no uncertainty, however much the seeds differ."""
    values = pd.DataFrame({"base": [1.0, 50.0, 900.0], "other": [3.0, 52.0, 902.0]})
    assert paired_difference(values, "base").loc["other"].tolist() == [2, 2, 2]


@given(st.lists(st.tuples(positive, positive), min_size=2, max_size=8))
def test_difference_is_antisymmetric(pairs):
    values = pd.DataFrame(pairs, columns=["a", "b"])
    forth = paired_difference(values, "a").loc["b"]
    back = paired_difference(values, "b").loc["a"]
    assert forth.tolist() == pytest.approx([-back["mean"], -back["high"], -back["low"]])
    assert forth["low"] <= forth["mean"] <= forth["high"]


@given(st.lists(positive, min_size=2, max_size=8), st.floats(0.1, 10))
def test_ratio_of_scaled_runs_is_the_scale(base, scale):
    values = pd.DataFrame({"base": base, "other": [scale * value for value in base]})
    found = paired_ratio(values, "base")
    assert found.loc["other"].tolist() == pytest.approx([scale] * 3, rel=1e-6)
    assert found.loc["base"].tolist() == [1, 1, 1]


def test_one_seed_has_no_interval():
    found = paired_difference(pd.DataFrame({"base": [1.0], "other": [3.0]}), "base").loc["other"]
    assert found["mean"] == 2
    assert math.isnan(found["low"])
    assert math.isnan(found["high"])


@given(
    st.lists(st.tuples(positive, positive), min_size=2, max_size=8),
    st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
)
def test_what_slows_all_steps_of_a_repetition_cancels(pairs, slower):
    """As a process beside the ranks does, in some repetitions more than in others."""
    values = pd.DataFrame(pairs, columns=["a", "b"])
    disturbed = values.mul(slower[: len(values)], axis=0)
    expected = paired_ratio(values, "a").loc["b"].tolist()
    assert paired_ratio(disturbed, "a").loc["b"].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.8, 0.9, "lower"),
        (1.1, 1.2, "higher"),
        (0.9, 1.1, "same"),
        (1.0, 1.1, "same"),
        (math.nan, math.nan, "unknown"),
        (0.9, math.inf, "unknown"),
    ],
)
def test_verdict_needs_the_whole_interval(low, high, said):
    assert verdict(low, high, 1) == said
