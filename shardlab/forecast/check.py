"""Validation: of the fits against operations, of the model against runs it was not fitted on."""

from collections.abc import Iterable, Sequence
from statistics import mean, median

from shardlab.config.calibration_record import Calibration, Operation
from shardlab.config.link import bucket_bytes
from shardlab.config.schema import Forecast
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.core.document import Document
from shardlab.forecast.bounds import fit_compute, step_s
from shardlab.forecast.costs import Measured
from shardlab.forecast.machine import Machine, quickly
from shardlab.forecast.model import Model
from shardlab.forecast.uncertainty import estimate
from shardlab.forecast.workload import case_of, strategy_of


class Check(Document):
    """Predicted and measured step of one run; times in milliseconds."""

    timing: str
    run: str
    world_size: int
    link: str
    held_out: bool
    predicted_ms: float
    low_ms: float
    high_ms: float
    """95 % prediction interval of a measurement: covariances of the fits, unexplained variance, and
    the drift of the machine between other timings"""
    measured_ms: float
    error: float
    """predicted / measured - 1"""
    error_of_communication: float
    """the same at the speed that the machine had in that timing, by its own run without
    communication: without the drift between timings"""


class Summary(Document):
    """Absolute errors over held-out runs, and the coverage of their intervals."""

    runs: int
    median: float
    worst: float
    median_of_communication: float
    worst_of_communication: float
    within: float
    """fraction of measurements inside their 95 % prediction interval"""


def fitted_runs(timings: Iterable[TimedRun], forecast: Forecast) -> list[TimedRun]:
    """Return the runs that the model is fitted on, and the no-communication bounds of all timings,
    which tell how far the machine drifts from one to the next."""
    return [
        run
        for run in timings
        if run.run == NO_COMMUNICATION
        or (run.timing in forecast.timings and run.run in forecast.runs)
    ]


def unknown(timings: Iterable[TimedRun], model: Model) -> dict[str, str]:
    """Return runs that the model cannot predict, with the reason."""
    reasons = {}
    for run in timings:
        if run.run != NO_COMMUNICATION and (why := model.obstacle(strategy_of(run))):
            reasons[run.run] = why
    return reasons


def first_of_each(timings: Iterable[TimedRun], left_out: Iterable[str]) -> list[TimedRun]:
    """Return one timed run of each strategy that the model can predict."""
    found: dict[str, TimedRun] = {}
    for run in timings:
        if run.run != NO_COMMUNICATION and run.run not in left_out:
            found.setdefault(run.run, run)
    return list(found.values())


def check(timings: Sequence[TimedRun], known: Sequence[TimedRun], model: Model) -> list[Check]:
    """Validate every run that the model can predict, in the order of the timings.

    A timing of which no strategy was fitted is predicted without its own bound, too.
    """
    left_out = unknown(timings, model)
    alone = {run.timing: run for run in timings if run.run == NO_COMMUNICATION}
    seen = {(run.timing, run.run) for run in known if run.run != NO_COMMUNICATION}
    fitted = {timing for timing, _ in seen}
    models = {name: model if name in fitted else model.without(name) for name in alone}
    return [
        _check(
            run,
            models.get(run.timing, model),
            alone.get(run.timing),
            (run.timing, run.run) not in seen,
        )
        for run in timings
        if run.run != NO_COMMUNICATION and run.run not in left_out
    ]


def _check(run: TimedRun, model: Model, alone: TimedRun | None, held_out: bool) -> Check:
    case = case_of(run)
    own = model
    if alone is not None:
        own = model.at_speed_of(fit_compute(alone, model.cores), case.workload)
    found = estimate(model, *case)
    measured = step_s(run)
    return Check(
        timing=run.timing,
        run=run.run,
        world_size=run.world_size,
        link=run.link,
        held_out=held_out,
        predicted_ms=1e3 * found.value,
        low_ms=1e3 * found.low,
        high_ms=1e3 * found.high,
        measured_ms=1e3 * measured,
        error=found.value / measured - 1,
        error_of_communication=own.predict(*case) / measured - 1,
    )


def summarize(checks: Iterable[Check]) -> Summary | None:
    """Return the errors over held-out runs; None where there are none."""
    held_out = [each for each in checks if each.held_out]
    if not held_out:
        return None
    errors = [abs(each.error) for each in held_out]
    own = [abs(each.error_of_communication) for each in held_out]
    return Summary(
        runs=len(held_out),
        median=median(errors),
        worst=max(errors),
        median_of_communication=median(own),
        worst_of_communication=max(own),
        within=mean(each.low_ms <= each.measured_ms <= each.high_ms for each in held_out),
    )


class OperationFit(Document):
    """Measured and fitted time of one operation at one size."""

    operation: Operation
    world_size: int
    link: str
    nbytes: int
    """bytes of the whole vector"""
    measured_ms: float
    fitted_ms: float
    error: float
    """fitted / measured - 1"""
    efficiency: float
    """fraction of asymptotic bandwidth, the rate of the fit for infinite size, reached at this size
    """


def operation_fits(calibration: Calibration, machine: Machine) -> list[OperationFit]:
    """Compare every measured operation with the fit."""
    fits = []
    for each in calibration.transfers:
        bits = each.bits_per_second
        costs = Measured(
            machine,
            each.world_size,
            float(calibration.host["cores"]),
            bits,
            bucket=0.0 if bits is None else bucket_bytes(bits),
        )
        phase = costs.transfer(each.operation, each.nbytes)
        fitted, measured = costs.alone([phase]), quickly(each.seconds)
        beta = machine.transport[each.operation].beta * each.wire_bytes
        endless = max(beta, phase.nbytes / costs.rank.bytes_per_second)
        fits.append(
            OperationFit(
                operation=each.operation,
                world_size=each.world_size,
                link=each.link,
                nbytes=each.nbytes,
                measured_ms=1e3 * measured,
                fitted_ms=1e3 * fitted,
                error=fitted / measured - 1,
                efficiency=endless / measured,
            )
        )
    return fits
