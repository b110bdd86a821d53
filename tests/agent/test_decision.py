import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.agent.decisions.decision import decide
from shardlab.agent.records.history import History
from shardlab.agent.records.rounds import Measurement
from tests.agent.searches import LIMIT, begin

HISTORY = begin()
START = HISTORY.measured[HISTORY.start]
TOLERANCE = 0.03


def measured(ratios: list[float], quality: float = 1.0, peak: int = 1_000) -> list[Measurement]:
    """The incumbent's figures, each seed's step times its ratio."""
    return [
        each.model_copy(
            update={
                "step_ms_p50": each.step_ms_p50 * ratio,
                "val_ppl": each.val_ppl * quality,
                "memory_peak_bytes": peak,
            }
        )
        for each, ratio in zip(HISTORY.incumbent.measurements, ratios, strict=False)
    ]


def judged(measurements: list[Measurement], history: History = HISTORY):
    return decide(history, measurements, TOLERANCE, LIMIT)


RATIOS = st.lists(st.floats(0.2, 5), min_size=1, max_size=3)


@given(RATIOS, st.floats(0.5, 2), st.integers(1, 2 * LIMIT))
def test_trial_is_accepted_iff_significantly_faster_within_quality_and_memory_limits(
    ratios, quality, peak
):
    decision = judged(measured(ratios, quality, peak))
    comparison = decision.comparison
    shown = comparison.interval is not None and comparison.interval[1] < 1
    good = comparison.perplexity_ratio <= 1 + TOLERANCE
    assert (decision.decision == "accept") == (shown and good and peak <= LIMIT)


@given(RATIOS)
def test_interval_contains_the_ratio_and_needs_two_seeds(ratios):
    comparison = judged(measured(ratios)).comparison
    if len(ratios) < 2:
        assert comparison.interval is None
    else:
        low, high = comparison.interval
        assert low <= comparison.step_ratio * (1 + 1e-12)
        assert comparison.step_ratio <= high * (1 + 1e-12)


def test_interval_by_hand():
    # logs -0.1, -0.2, -0.3: mean -0.2, deviation 0.1; Student's t for 2 degrees of freedom 4.30265
    comparison = judged(measured([math.exp(x) for x in (-0.1, -0.2, -0.3)])).comparison
    half = 4.30265 * 0.1 / math.sqrt(3)
    assert comparison.interval == pytest.approx([math.exp(-0.2 - half), math.exp(-0.2 + half)])


def test_significant_gain_is_accepted():
    decision = judged(measured([0.90, 0.91, 0.92]))
    assert decision.decision == "accept"
    assert "3 seeds" in decision.reason


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        (measured([1.0, 1.0, 1.0]), "the interval reaches 1"),
        (measured([0.1]), "add seeds"),
        *((measured([0.5] * 3, quality), "perplexity") for quality in (1.031, math.inf, math.nan)),
        (measured([0.5] * 3, peak=LIMIT + 1), "peak memory"),
    ],
)
def test_rejection_states_its_reason(figures, reason):
    decision = judged(figures)
    assert decision.decision == "reject"
    assert reason in decision.reason


def test_comparison_is_paired_by_seed():
    backwards = measured([0.90, 0.91, 0.92])[::-1]
    assert judged(backwards).comparison.step_ratio == pytest.approx(
        judged(measured([0.90, 0.91, 0.92])).comparison.step_ratio
    )


def test_no_common_seed_is_rejected():
    others = [each.model_copy(update={"seed": 90 + each.seed}) for each in measured([0.5] * 3)]
    assert judged(others).decision == "reject"


def test_quality_is_compared_with_the_start_not_the_incumbent():
    worse = measured([1.0] * 3, quality=1.02)
    incumbent = HISTORY.incumbent.model_copy(update={"measurements": worse})
    drifted = HISTORY.model_copy(update={"incumbent": incumbent})
    assert judged(measured([0.5] * 3, 1.02), drifted).decision == "accept"
    assert judged(measured([0.5] * 3, 1.02 * 1.02), drifted).decision == "reject"


def test_reason_states_ratio_and_interval():
    decision = judged(measured([0.90, 0.91, 0.92]))
    low, high = decision.comparison.interval
    assert f"{decision.comparison.step_ratio:.3f} times the incumbent's" in decision.reason
    assert f"95 % interval {low:.3f} to {high:.3f}" in decision.reason
