"""Joins what was measured of every run and seed into one record each."""

import csv
import json
from pathlib import Path
from typing import Any

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, read_json
from shardlab.core.parameters import Parameters
from shardlab.core.progress import say
from shardlab.core.records import (
    Breakdown,
    Record,
    Setting,
    Training,
    Validation,
    table_row,
    write_records,
)
from stages.common import run


class Metrics(Setting, Training):
    """What the train stage writes."""


def main(params: Parameters) -> None:
    """results/results.jsonl, and the same columns in results/results.csv."""
    runs, seeds = params("runs", "seeds")
    records = [collect(Path("results"), name, seed) for name in runs for seed in seeds]
    write_records("results/results.jsonl", records)
    with (
        atomic("results/results.csv") as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        writer = csv.DictWriter(file, list(Record.model_fields), lineterminator="\n")
        writer.writeheader()
        writer.writerows(table_row(record) for record in records)
    say(f"collect: {len(records)} records of {len(runs)} runs in results/results.jsonl")


def collect(results: Path, name: str, seed: int) -> Record:
    """The record of one run and seed.

    Raises:
        UserError: a file is missing, is not what its stage writes, or is of another run or seed.
    """
    metrics_file = results / "train" / name / f"seed{seed}" / "metrics.json"
    metrics = _read(Metrics, metrics_file, f"train --run {name} --seed {seed}")
    if (metrics["run"], metrics["seed"]) != (name, seed):
        raise UserError(
            f"{metrics_file}: holds run {metrics['run']!r} seed {metrics['seed']}: "
            f"repeat python -m stages.train --run {name} --seed {seed}"
        )
    breakdown = _read(
        Breakdown, results / "profile" / name / f"seed{seed}.json", f"profile {name} {seed}"
    )
    validation = _read(
        Validation, results / "validate" / name / f"seed{seed}.json", f"validate {name} {seed}"
    )
    return Record(**metrics, **breakdown, **validation)


def _read(kind: type[Document], path: Path, command: str) -> dict[str, Any]:
    mend = f"run python -m stages.{command}"
    try:
        value = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {mend}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}): {mend}") from None
    try:
        return validate(kind, value, str(path)).model_dump()
    except UserError as error:
        raise UserError(f"{error}: {mend}") from None


if __name__ == "__main__":
    run(main)
