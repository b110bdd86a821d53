"""Steps and time to a loss, and the loss at a time, of training and of validation curves."""

import math

import pandas as pd
import pytest

from shardlab.report.quality import quality_after, quality_row, steps_to_quality, training_curve
from shardlab.report.settings import Quality
from tests.record_factory import make_record


def test_smoothing_averages_over_a_twentieth_of_the_steps():
    assert training_curve([3.0, 1.0, 2.0]).to_dict() == {1: 3.0, 2: 1.0, 3: 2.0}
    assert [*training_curve([5.0 + (-1) ** step for step in range(80)])][3:] == [5.0] * 77
    # a loss that is not finite affects its window only
    curve = training_curve([1.0] * 10 + [math.nan] + [1.0] * 29)
    assert [*curve.index[curve.isna()]] == [11, 12]


def test_steps_to_quality_are_interpolated_and_the_first_crossing_counts():
    curve = training_curve([5.0, 4.0, 3.0, 2.0])
    for threshold, steps in ((6.0, 1), (4.0, 2), (3.5, 2.5), (2.0, 4)):
        assert steps_to_quality(curve, threshold) == steps
    assert steps_to_quality(training_curve([5.0, 2.0, 5.0, 1.0]), 2.0) == 2.0
    # of evaluations every ten steps; before the first one nothing is known
    validation = pd.Series({10: 5.0, 20: 4.0, 30: math.nan, 40: 2.0})
    for threshold, steps in ((5.5, 10), (4.8, 12), (4.0, 20), (3.0, 40)):
        assert steps_to_quality(validation, threshold) == pytest.approx(steps)


@pytest.mark.parametrize("losses", [[5.0, 4.0], [math.nan, math.nan], []])
def test_unreached_threshold_is_none(losses):
    assert steps_to_quality(training_curve(losses), 3.9) is None


def test_quality_is_that_of_the_last_point_by_then():
    curve = pd.Series({10: 5.0, 20: 4.0, 30: math.nan})
    assert quality_after(curve, 9.9) is None
    assert [quality_after(curve, steps) for steps in (10, 19.9, 20, 29)] == [5.0, 5.0, 4.0, 4.0]
    assert quality_after(curve, 1000) is None
    assert quality_after(curve.loc[:20], 1000) == 4.0


QUALITY = Quality(train_loss=(4.0, 1.0), val_loss=(4.5,), time_s=(0.25, 9))
CURVES = {
    "train_loss": training_curve([5.0, 4.0, 3.0]),
    "val_loss": pd.Series({2: 5.0, 4: 4.0}),
}


def test_time_to_a_loss_is_steps_to_it_times_the_step_of_the_run():
    record = make_record("ddp", 3).model_copy(update={"step_ms_mean": 100.0})
    row = quality_row(record, CURVES, QUALITY)
    assert (row["run"], row["seed"], row["strategy_hash"]) == ("ddp", 3, record.strategy_hash)
    reached = {"train_loss": {"4": 2.0, "1": None}, "val_loss": {"4.5": 3.0}}
    assert row["steps_to_quality"] == reached
    for name, losses in reached.items():
        for loss, steps in losses.items():
            seconds = row["time_to_quality_s"][name][loss]
            assert seconds == (None if steps is None else pytest.approx(steps * 0.1))
    at = {"train_loss": {"0.25": 4.0, "9": 3.0}, "val_loss": {"0.25": 5.0, "9": 4.0}}
    assert row["quality_at_time"] == at
    # without evaluations nothing is said of validation
    row = quality_row(record, {"train_loss": CURVES["train_loss"]}, QUALITY)
    assert [*row["steps_to_quality"]] == [*row["quality_at_time"]] == ["train_loss"]


@pytest.mark.parametrize(
    "part", [{"sync": {"every": 4, "warmup_steps": 9}}, {"gradients": {"warmup_steps": 9}}]
)
def test_a_run_with_a_warm_up_has_steps_to_a_loss_and_no_time(part):
    record = make_record("ddp").model_copy(update={"strategy": {"engine": "ddp", **part}})
    row = quality_row(record, CURVES, QUALITY)
    assert row["steps_to_quality"]["train_loss"]["4"] == 2.0
    for name in ("time_to_quality_s", "quality_at_time"):
        assert {*row[name]["train_loss"].values(), *row[name]["val_loss"].values()} == {None}
