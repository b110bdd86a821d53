"""The forecast as one document and as tables."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from shardlab.config.calibration_record import Calibration
from shardlab.config.contention import warnings_of
from shardlab.config.schema import Forecast
from shardlab.config.timing_record import TimedRun, machine_name, machines
from shardlab.core.document import Document
from shardlab.core.files import write_text
from shardlab.forecast.check import (
    Check,
    OperationFit,
    Summary,
    check,
    first_of_each,
    fitted_runs,
    operation_fits,
    summarize,
    unknown,
)
from shardlab.forecast.extrapolation import (
    ASSUMPTIONS,
    BreakEven,
    Point,
    break_even,
    extrapolate,
)
from shardlab.forecast.integer_sums import IntegerSum, integer_sums
from shardlab.forecast.machine import fit_machine
from shardlab.forecast.model import fit_model
from shardlab.forecast.presets import preset


class EngineFit(Document):
    """Fitted overhead of an engine per collective."""

    engine: str
    work_ms: float
    """CPU milliseconds"""


class ForecastDocument(Document):
    """Document of results/forecast/forecast.json."""

    renamed: ClassVar[dict[str, str]] = {"learnt_from": "fitted_on"}

    fitted_on: list[str]
    """timing/run, no-communication bounds included: those of all timings"""
    summary: Summary | None
    """over the held-out runs; None where there are none"""
    checks: list[Check]
    left_out: dict[str, str]
    """runs that the model cannot predict, with the reason"""
    operations: list[OperationFit]
    engines: list[EngineFit]
    wait_ms: float
    """before an operation, until the threads of all ranks have a core"""
    noise_ms: float
    """standard deviation of a measured step that the model was fitted on"""
    points: list[Point]
    links: dict[str, str]
    """presets and their sources"""
    break_even: list[BreakEven]
    integer_sums: list[IntegerSum] = []
    """empty where int8 or int8-shared was not calibrated"""
    assumptions: list[str]
    warnings: list[str]
    """calibration and timings that others disturbed, used all the same"""


def predict(
    calibration: Calibration, timings: Sequence[TimedRun], forecast: Forecast
) -> ForecastDocument:
    """Fit the model and predict.

    Raises:
        UserError: the timings lack steps without communication, or a preset is unknown.
    """
    machine = fit_machine(calibration)
    known = fitted_runs(timings, forecast)
    model = fit_model(machine, known)
    left_out = unknown(timings, model)
    runs = first_of_each(timings, left_out)
    checks = check(timings, known, model)
    return ForecastDocument(
        fitted_on=[f"{run.timing}/{run.run}" for run in known],
        summary=summarize(checks),
        checks=checks,
        left_out=left_out,
        operations=operation_fits(calibration, machine),
        engines=[
            EngineFit(engine=name, work_ms=1e3 * work) for name, work in model.engines.work.items()
        ],
        wait_ms=1e3 * model.engines.wait,
        noise_ms=1e3 * model.engines.noise,
        points=extrapolate(runs, model, forecast.links, forecast.ranks),
        links={name: preset(name).source for name in forecast.links},
        break_even=break_even(runs, model),
        integer_sums=integer_sums(machine, forecast.links, forecast.ranks),
        assumptions=list(ASSUMPTIONS),
        warnings=[
            *_of_other_machines(calibration, timings),
            *warnings_of(
                [
                    ("calibration", calibration.contention),
                    *((f"timing {run.timing}", run.contention) for run in timings),
                ]
            ),
        ],
    )


def _of_other_machines(calibration: Calibration, timings: Sequence[TimedRun]) -> list[str]:
    here = machine_name(calibration.host, calibration.torch)
    return [
        f"calibration is of {here}, timings {', '.join(names)} of {there}: measure the latter here "
        "too, with snakemake --cores all -R timing"
        for there, names in machines(timings).items()
        if there != here
    ]


def write_forecast(folder: Path, predicted: ForecastDocument) -> None:
    """Write forecast.json, and its tables as CSV."""
    predicted.to_file(folder / "forecast.json")
    tables: dict[str, tuple[type[Document], Iterable[Document]]] = {
        "checks": (Check, predicted.checks),
        "scaling": (Point, predicted.points),
        "operations": (OperationFit, predicted.operations),
        "break_even": (BreakEven, predicted.break_even),
    }
    for name, (kind, rows) in tables.items():
        text = io.StringIO()
        writer = csv.DictWriter(text, list(kind.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(row.model_dump() for row in rows)
        write_text(folder / f"{name}.csv", text.getvalue())
