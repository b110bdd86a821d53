"""Fits of calibrated operations: lines, and the machine that they make."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.errors import UserError
from shardlab.predict.machine import fit_line, fit_machine
from shardlab.predict.results import operation_fits
from tests.predict.timing_factory import MACHINE, made_calibration

SIZES = [2.0**n for n in range(12, 23, 2)]


def test_fit_recovers_the_machine():
    calibration = made_calibration()
    machine = fit_machine(calibration)
    fits = operation_fits(calibration, machine)
    assert len(fits) == len(calibration.transfers)
    assert max(abs(fit.error) for fit in fits) < 1e-3
    (found,), (lines,) = machine.codecs.values(), MACHINE.codecs.values()
    assert found.encode.at(1e5) == pytest.approx(lines.encode.at(1e5), rel=1e-3)
    assert found.payload.at(1e5) == pytest.approx(lines.payload.at(1e5), rel=1e-3)


def test_calibration_with_too_few_sizes_is_refused():
    calibration = made_calibration()
    few = [t for t in calibration.transfers if t.nbytes == 4096]
    with pytest.raises(UserError, match="fewer than 3 sizes of exchange"):
        fit_machine(calibration.model_copy(update={"transfers": few}))


@given(st.floats(1e-6, 1e-1), st.floats(1e-12, 1e-6))
def test_fit_recovers_a_line(alpha, beta):
    line = fit_line(SIZES, [alpha + beta * size for size in SIZES])
    for size in SIZES:
        assert line.at(size) == pytest.approx(alpha + beta * size, rel=1e-6)


def test_fitted_line_has_no_negative_coefficient():
    line = fit_line([1.0, 2.0, 3.0], [3.0, 2.0, 1.0])
    assert 0 <= line.beta < 1e-9
    assert 0 <= fit_line([1.0, 2.0, 4.0], [0.1, 1.2, 3.1]).alpha < 1e-9


def test_fit_weights_relative_errors():
    """One tenth more at the smallest size moves the fit there by more than half of it."""
    seconds = [1e-4 + 1e-9 * size for size in SIZES]
    line = fit_line(SIZES, [1.1 * seconds[0], *seconds[1:]])
    assert line.at(SIZES[0]) > 1.02 * seconds[0]
    assert line.at(SIZES[-1]) == pytest.approx(seconds[-1], rel=0.01)
