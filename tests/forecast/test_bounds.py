"""Drift of the speed of a machine, by steps without communication."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.forecast.bounds import Bound, drift_within, speed_of
from shardlab.forecast.uncertainty import propagate
from shardlab.forecast.work import Compute
from tests.forecast.timing_factory import MODEL


@given(st.floats(1e-3, 1e3), st.integers(0, 2**32 - 1))
def test_drift_is_free_of_units_and_of_what_repetitions_vary(unit, seed):
    random = np.random.default_rng(seed)
    steps = 1 + 0.02 * random.standard_normal(200)
    assert drift_within((unit * steps).tolist()) == pytest.approx(drift_within(steps.tolist()))
    assert drift_within(steps.tolist()) < 0.01


@given(st.floats(0.03, 0.5), st.integers(0, 2**32 - 1))
def test_drift_is_the_deviation_of_parts(drift, seed):
    """Half of the parts at one speed, the others at another."""
    random = np.random.default_rng(seed)
    steps = np.repeat([1 - drift, 1 + drift] * 4, 25) * (1 + 0.01 * random.standard_normal(200))
    assert drift_within(steps.tolist()) == pytest.approx(drift * (8 / 7) ** 0.5, rel=0.1)


def test_few_repetitions_tell_nothing_of_drift():
    assert drift_within([1.0, 2.0] * 39) == 0
    assert drift_within([1.0] * 80) == 0


def test_the_calibration_is_as_unsure_as_the_machine_drifts_in_a_timing():
    """Timings that took turns have the same speed, and the calibration another."""
    compute = {2: Compute(1e-2, 2e-2, 1e-3)}
    calm = [Bound(name, 2, compute[2], 0.01) for name in "ab"]
    found = speed_of([*calm, Bound("c", 2, compute[2], 0.01, drift=0.2)], compute)
    assert found.drift == 0 and found.calibration == 0.2

    def step(model):
        return model.machine.transport["exchange"].at(1e6) + 1e-2

    still = MODEL._replace(speed=speed_of(calm, compute))
    unsure = MODEL._replace(speed=found)
    whole = [propagate(step, each, whole=True) for each in (still, unsure)]
    assert whole[0].value == whole[1].value
    moved = 0.2 * MODEL.machine.transport["exchange"].at(1e6)
    half = [each.high - each.value for each in whole]
    assert half[1] ** 2 - half[0] ** 2 == pytest.approx((1.959964 * moved) ** 2, rel=1e-6)
    # as on another machine, whose operations are given
    other = [propagate(step, each).high for each in (still, unsure)]
    assert other[0] == other[1]
