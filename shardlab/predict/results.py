"""The forecast as one document and as tables: validation on held-out runs, and predictions."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median

import pandas as pd

from shardlab.core.document import Document
from shardlab.core.files import atomic
from shardlab.predict.clusters import preset
from shardlab.predict.costs import MeasuredCosts
from shardlab.predict.extrapolation import (
    ASSUMPTIONS,
    BreakEven,
    Point,
    break_even,
    extrapolate,
)
from shardlab.predict.machine import Machine, fit_machine, lower_quartile
from shardlab.predict.model import PerformanceModel, case_of, fit_model, strategy_of
from shardlab.predict.settings import Forecast
from shardlab.predict.step import section_seconds
from shardlab.results.calibration_record import Calibration, Operation
from shardlab.results.contention import warnings_of
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult, machine_name, machines


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
    """95 % prediction interval of a measurement"""
    measured_ms: float
    error: float
    """predicted / measured - 1"""


class Summary(Document):
    """Absolute errors over held-out runs, and the coverage of their intervals."""

    runs: int
    median: float
    worst: float
    within: float
    """fraction of measurements inside their 95 % prediction interval"""


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


class EngineFit(Document):
    """Fitted overhead of an engine per collective."""

    engine: str
    work_ms: float
    """CPU milliseconds"""


class ForecastDocument(Document):
    """Document of results/forecast/forecast.json."""

    fitted_on: list[str]
    """timing/run, steps without communication included"""
    summary: Summary | None
    """over the held-out runs; None where there are none"""
    checks: list[Check]
    left_out: dict[str, str]
    """runs that the model cannot predict, with the reason"""
    operations: list[OperationFit]
    engines: list[EngineFit]
    wait_ms: float
    """before a collective, until the threads of all ranks have a core"""
    points: list[Point]
    links: dict[str, str]
    """presets and their sources"""
    break_even: list[BreakEven]
    assumptions: list[str]
    warnings: list[str]
    """calibration and timings that others disturbed, used all the same"""


def fitted_runs(timings: Iterable[TimingResult], forecast: Forecast) -> list[TimingResult]:
    """Return the runs that the model is fitted on, and those without communication beside them."""
    names = {*forecast.runs, NO_COMMUNICATION}
    return [run for run in timings if run.timing in forecast.timings and run.run in names]


def predict(
    calibration: Calibration, timings: Sequence[TimingResult], forecast: Forecast
) -> ForecastDocument:
    """Fit the model, validate it and predict, with as many samples of a rank and micro-batches as
    in the first of the timings that it is fitted on.

    Raises:
        UserError: the timings lack steps without communication, or a preset is unknown.
    """
    machine = fit_machine(calibration)
    known = fitted_runs(timings, forecast)
    model = fit_model(machine, known)
    parts = known[0].batch_size, known[0].accumulation
    sizes = {run.timing: (run.batch_size, run.accumulation) for run in timings}
    others = {timing: size for timing, size in sizes.items() if size != parts}
    strategies = [
        run for run in timings if run.run != NO_COMMUNICATION and run.timing not in others
    ]
    reasons = {run.run: model.obstacle(strategy_of(run)) for run in strategies}
    predictable = [run for run in strategies if reasons[run.run] is None]
    first = {run.run: run for run in reversed(predictable)}
    runs = [run for run in predictable if first[run.run] is run]
    checks = check(predictable, known, model)
    disturbed = [(f"timing {run.timing}", run.contention) for run in timings]
    return ForecastDocument(
        fitted_on=[f"{run.timing}/{run.run}" for run in known],
        summary=summarize(checks),
        checks=checks,
        left_out={
            **{run: why for run, why in reasons.items() if why is not None},
            **{
                f"timing {name}": f"its steps have other micro-batches ({_parts(size)}) than "
                f"those of the model ({_parts(parts)})"
                for name, size in others.items()
            },
        },
        operations=operation_fits(calibration, machine),
        engines=[
            EngineFit(engine=name, work_ms=1e3 * work) for name, work in model.launch_s.items()
        ],
        wait_ms=1e3 * model.wait_s,
        points=extrapolate(runs, model, forecast.links, forecast.ranks),
        links={name: preset(name).source for name in forecast.links},
        break_even=break_even(runs, model),
        assumptions=list(ASSUMPTIONS),
        warnings=[
            *_of_other_machines(calibration, timings),
            *warnings_of([("calibration", calibration.contention), *disturbed]),
        ],
    )


def _parts(size: tuple[int, int]) -> str:
    """Return sequences and number of the micro-batches of a rank in words."""
    return f"{size[1]} x {size[0]} sequences"


def check(
    runs: Iterable[TimingResult], known: Iterable[TimingResult], model: PerformanceModel
) -> list[Check]:
    """Predict runs that the model supports, in their order; those it was not fitted on validate
    it."""
    seen = {(run.timing, run.run) for run in known}
    checks = []
    for run in runs:
        value, low, high = model.estimate(*case_of(run))
        measured_ms = median(run.step_ms)
        checks.append(
            Check(
                timing=run.timing,
                run=run.run,
                world_size=run.world_size,
                link=run.link,
                held_out=(run.timing, run.run) not in seen,
                predicted_ms=1e3 * value,
                low_ms=1e3 * low,
                high_ms=1e3 * high,
                measured_ms=measured_ms,
                error=1e3 * value / measured_ms - 1,
            )
        )
    return checks


def summarize(checks: Iterable[Check]) -> Summary | None:
    """Return the errors over held-out runs; None where there are none."""
    held_out = [check for check in checks if check.held_out]
    if not held_out:
        return None
    errors = [abs(check.error) for check in held_out]
    return Summary(
        runs=len(held_out),
        median=median(errors),
        worst=max(errors),
        within=mean(check.low_ms <= check.measured_ms <= check.high_ms for check in held_out),
    )


def operation_fits(calibration: Calibration, machine: Machine) -> list[OperationFit]:
    """Compare every measured operation with the fit."""
    fits = []
    for transfer in calibration.transfers:
        cores = float(calibration.host["cores"])
        costs = MeasuredCosts(machine, transfer.world_size, cores)
        phase = costs.transfer(transfer.operation, transfer.nbytes)
        fitted = section_seconds([(phase,)], costs.rank)
        measured = lower_quartile(transfer.seconds)
        fits.append(
            OperationFit(
                operation=transfer.operation,
                world_size=transfer.world_size,
                link=transfer.link,
                nbytes=transfer.nbytes,
                measured_ms=1e3 * measured,
                fitted_ms=1e3 * fitted,
                error=fitted / measured - 1,
            )
        )
    return fits


def _of_other_machines(calibration: Calibration, timings: Sequence[TimingResult]) -> list[str]:
    here = machine_name(calibration.host, calibration.torch)
    return [
        f"calibration is of {here}, timings {', '.join(names)} of {there}: measure the latter here "
        "too, with snakemake --cores all -R timing"
        for there, names in machines(timings).items()
        if there != here
    ]


def write_forecast(folder: Path, predicted: ForecastDocument) -> None:
    """Write forecast.json and its tables as CSV."""
    predicted.to_file(folder / "forecast.json")
    tables: dict[str, tuple[type[Document], Sequence[Document]]] = {
        "checks": (Check, predicted.checks),
        "scaling": (Point, predicted.points),
        "operations": (OperationFit, predicted.operations),
        "break_even": (BreakEven, predicted.break_even),
    }
    for name, (kind, rows) in tables.items():
        table = pd.DataFrame([row.model_dump() for row in rows], columns=list(kind.model_fields))
        with atomic(folder / f"{name}.csv") as temporary:
            table.to_csv(temporary, index=False, lineterminator="\n")
