"""Join of the files of train, profile, validate, estimate and timing into one record per run.

An error names the stage to run.
"""

import csv
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from shardlab.config.run_record import (
    Breakdown,
    Estimate,
    Joined,
    Record,
    Setting,
    Training,
    Validation,
    table_row,
)
from shardlab.config.schema import Quality
from shardlab.config.timing_record import TimedRun, scaling_efficiency
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, finite, read_json, read_json_lines
from shardlab.report.quality import quality_at_time, steps_to_quality, time_to_quality

D = TypeVar("D", bound=Document)


class Metrics(Setting, Training):
    """metrics.json of the train stage."""


class LossCurve(NamedTuple):
    """Training loss of one run and seed; one entry for each step."""

    steps: list[int]
    losses: list[float]
    """nats per token; NaN where it was not finite"""
    seconds: list[float]
    """training time until the end of the step"""


def read_document(kind: type[D], path: Path, stage: str) -> D:
    """Return the document of `kind` that a stage wrote as JSON.

    Args:
        stage: module of `stages` that writes the file, with its arguments.

    Raises:
        UserError: the file is missing, damaged or holds something else.
    """
    return kind.from_file(path, _fix(stage))


def read_estimate(path: Path, run: str) -> Estimate:
    """Return the memory estimate of one run.

    Raises:
        UserError: the file is missing or damaged, or has no estimate of the run.
    """
    fix = _fix("estimate")
    estimates = read_json(path, fix)
    if run not in estimates:
        raise UserError(f"{path}: has no run {run!r}: {fix}")
    try:
        return validate(Estimate, estimates[run], str(path))
    except UserError as error:
        raise UserError(f"{error}: {fix}") from None


def read_loss_curve(results: Path, run: str, seed: int) -> LossCurve:
    """Return the loss curve in the events of a training run.

    Raises:
        UserError: the file is missing or damaged, or an event has no step, loss or time.
    """
    path = results / "train" / run / f"seed{seed}" / "events.jsonl"
    fix = _fix(_train(run, seed))
    events = read_json_lines(path, fix)
    try:
        return LossCurve(
            steps=[int(event["step"]) for event in events],
            losses=[math.nan if event["loss"] is None else event["loss"] for event in events],
            seconds=[*accumulate(event["step_ms"] / 1e3 for event in events)],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the events of a training run ({error!r}): {fix}") from None


def _train(run: str, seed: int) -> str:
    return f"train --run {run} --seed {seed}"


def _fix(stage: str) -> str:
    return f"run python -m stages.{stage}"


def join_record(
    results: Path,
    run: str,
    seed: int,
    *,
    quality: Quality,
    timed: Sequence[TimedRun],
    estimate: Estimate,
) -> Record:
    """Return the record of one run and seed.

    Args:
        results: folder that all stages write to.
        timed: runs of all timings.

    Raises:
        UserError: a file is missing or is not of its stage.
    """
    file = f"{run}/seed{seed}"
    metrics = read_document(Metrics, results / "train" / file / "metrics.json", _train(run, seed))
    breakdown = read_document(Breakdown, results / "profile" / f"{file}.json", f"profile {run}")
    validation = read_document(Validation, results / "validate" / f"{file}.json", f"validate {run}")
    efficiency = scaling_efficiency(timed, metrics.strategy_hash, metrics.world_size, metrics.link)
    joined = Joined(
        memory_estimate_bytes=estimate.total,
        scaling_efficiency=efficiency,
        **_time_to_quality(read_loss_curve(results, run, seed), quality),
    )
    values: dict[str, Any] = {}
    for part in (metrics, breakdown, validation, joined):
        values |= part.model_dump()
    return Record(**{name: value for name, value in values.items() if name in Record.model_fields})


def _time_to_quality(curve: LossCurve, quality: Quality) -> dict[str, Any]:
    """Return the fields of `Joined` on losses that were reached, and at which time."""
    losses, seconds = curve.losses, curve.seconds
    values = {
        "steps_to_quality": {f"{x:g}": steps_to_quality(losses, x) for x in quality.train_loss},
        "time_to_quality_s": {
            f"{x:g}": time_to_quality(losses, seconds, x) for x in quality.train_loss
        },
        "quality_at_time": {f"{t:g}": quality_at_time(losses, seconds, t) for t in quality.time_s},
    }
    return cast(dict[str, Any], finite(values))


def write_csv(path: str | Path, records: Sequence[Record]) -> None:
    """Write the records as CSV with a column for each field; nested values are JSON text."""
    with (
        atomic(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, list(Record.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table_row(record) for record in records)
