"""Join the measurements and estimates of every run and seed into one record each."""

import csv
import json
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, read_json, read_json_lines
from shardlab.core.progress import say
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Quality
from shardlab.measurements.quality import quality_at_time, steps_to_quality, time_to_quality
from shardlab.measurements.timing import TimedRun, read_timing, scaling_efficiency
from shardlab.memory.step import Estimate
from shardlab.records.run import (
    Breakdown,
    Joined,
    Record,
    Setting,
    Training,
    Validation,
    table_row,
    write_records,
)
from stages.common import run

_RESULTS = Path("results")


class Metrics(Setting, Training):
    """What the train stage writes."""


def main(params: Parameters) -> None:
    """results/results.jsonl, and the same columns in results/results.csv."""
    runs, seeds, timings, quality = params("runs", "seeds", "timings", "quality")
    folder = _RESULTS / "timings"
    timed = [run for name, timing in timings.items() for run in read_timing(folder, name, timing)]
    estimates = {name: estimate(_RESULTS, name) for name in runs}
    records = [
        collect(_RESULTS, name, seed, quality, timed, estimates[name])
        for name in runs
        for seed in seeds
    ]
    write_records("results/results.jsonl", records)
    with (
        atomic("results/results.csv") as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, list(Record.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table_row(record) for record in records)
    say(f"collect: {len(records)} records of {len(runs)} runs in results/results.jsonl")


def collect(
    results: Path,
    name: str,
    seed: int,
    quality: Quality,
    timed: Sequence[TimedRun],
    estimate: Estimate,
) -> Record:
    """The record of one run and seed.

    Raises:
        UserError: a file is missing, is not what its stage writes, or is of another run or seed.
    """
    folder, train = results / "train" / name / f"seed{seed}", f"train --run {name} --seed {seed}"
    metrics = _read(Metrics, folder / "metrics.json", train)
    if (metrics["run"], metrics["seed"]) != (name, seed):
        raise UserError(
            f"{folder / 'metrics.json'}: holds run {metrics['run']!r} seed {metrics['seed']}: "
            f"repeat python -m stages.{train}"
        )
    breakdown = _read(
        Breakdown, results / "profile" / name / f"seed{seed}.json", f"profile {name} {seed}"
    )
    validation = _read(
        Validation, results / "validate" / name / f"seed{seed}.json", f"validate {name} {seed}"
    )
    setting = metrics["strategy_hash"], metrics["world_size"], metrics["link"]
    joined = Joined(
        memory_estimate_bytes=estimate.traced and sum(estimate.traced.values()),
        memory_closed_form_bytes=sum(estimate.closed_form.values()),
        scaling_efficiency=scaling_efficiency(timed, *setting),
        **_reached(folder / "events.jsonl", quality, train),
    )
    return Record(**metrics, **breakdown, **validation, **joined.model_dump())


def estimate(results: Path, name: str) -> Estimate:
    """The memory of one run as it was estimated.

    Raises:
        UserError: there is no estimate of it.
    """
    path, fix = results / "memory.json", "run python -m stages.estimate"
    found = _read_json(path, fix)
    if not isinstance(found, dict) or name not in found:
        raise UserError(f"{path}: has no run {name!r}: {fix}")
    return Estimate(**_checked(Estimate, found[name], path, fix))


def _reached(path: Path, quality: Quality, command: str) -> dict[str, Any]:
    """How soon the run was how good."""
    fix = f"run python -m stages.{command}"
    try:
        events = read_json_lines(path)
        losses = [float(event["loss"]) for event in events]
        times = [*accumulate(event["step_ms"] / 1e3 for event in events)]
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {fix}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the events of a training run ({error!r}): {fix}") from None
    thresholds, moments = quality.train_loss, quality.time_s
    return {
        "steps_to_quality": {f"{loss:g}": steps_to_quality(losses, loss) for loss in thresholds},
        "time_to_quality_s": {
            f"{loss:g}": time_to_quality(losses, times, loss) for loss in thresholds
        },
        "quality_at_time": {
            f"{moment:g}": quality_at_time(losses, times, moment) for moment in moments
        },
    }


def _read(kind: type[Document], path: Path, command: str) -> dict[str, Any]:
    fix = f"run python -m stages.{command}"
    return _checked(kind, _read_json(path, fix), path, fix)


def _read_json(path: Path, fix: str) -> Any:
    try:
        return read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {fix}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}): {fix}") from None


def _checked(kind: type[Document], value: Any, path: Path, fix: str) -> dict[str, Any]:
    try:
        return validate(kind, value, str(path)).model_dump()
    except UserError as error:
        raise UserError(f"{error}: {fix}") from None


if __name__ == "__main__":
    run(main)
