"""Join of the files of train, profile, validate, estimate and timing into one record per run."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

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
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, finite
from shardlab.report.quality import quality_at_time, steps_to_quality, time_to_quality
from shardlab.report.stage_files import LossCurve, read_document, read_loss_curve, train_stage


class Metrics(Setting, Training):
    """metrics.json of the train stage."""


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
        UserError: a file is missing, is not of its stage, or is of another run or seed.
    """
    path, train = results / "train" / run / f"seed{seed}" / "metrics.json", train_stage(run, seed)
    metrics = read_document(Metrics, path, train)
    if (metrics.run, metrics.seed) != (run, seed):
        raise UserError(
            f"{path}: holds run {metrics.run!r} seed {metrics.seed}: "
            f"repeat python -m stages.{train}"
        )
    breakdown, validation = (
        read_document(kind, results / stage / run / f"seed{seed}.json", f"{stage} {run} {seed}")
        for kind, stage in ((Breakdown, "profile"), (Validation, "validate"))
    )
    joined = Joined(
        memory_estimate_bytes=estimate.traced_bytes,
        memory_closed_form_bytes=estimate.closed_form_bytes,
        scaling_efficiency=scaling_efficiency(
            timed, metrics.strategy_hash, metrics.world_size, metrics.link
        ),
        **_time_to_quality(read_loss_curve(results, run, seed), quality),
    )
    parts = (metrics, breakdown, validation, joined)
    values = {key: value for part in parts for key, value in part.model_dump().items()}
    return Record(**{key: value for key, value in values.items() if key in Record.model_fields})


def _time_to_quality(curve: LossCurve, quality: Quality) -> dict[str, Any]:
    """Return the fields of `Joined` on losses that were reached, and at which time."""
    losses, seconds = curve.losses, curve.seconds
    thresholds = {f"{loss:g}": loss for loss in quality.train_loss}
    found = {
        "steps_to_quality": {
            key: steps_to_quality(losses, loss) for key, loss in thresholds.items()
        },
        "time_to_quality_s": {
            key: time_to_quality(losses, seconds, loss) for key, loss in thresholds.items()
        },
        "quality_at_time": {
            f"{moment:g}": quality_at_time(losses, seconds, moment) for moment in quality.time_s
        },
    }
    return cast(dict[str, Any], finite(found))


def write_csv(path: str | Path, records: Sequence[Record]) -> None:
    """Write the records as CSV with a column for each field; nested values are JSON text."""
    with (
        atomic(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, list(Record.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table_row(record) for record in records)
