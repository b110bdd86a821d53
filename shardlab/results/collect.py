"""Join of the files of train, profile, validate, estimate and timing into one record per run.

An error names the stage to run.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, read_json, read_json_lines
from shardlab.results.files import read_failure
from shardlab.results.result import Breakdown, Failure
from shardlab.results.timing_result import TimingResult, scaling_efficiency
from shardlab.results.train_result import (
    Joined,
    MemoryEstimate,
    Metrics,
    TrainResult,
    Validation,
    table_row,
)

_FIX_TRAINING = "run shardlab train --run {run} --seed {seed}"


def read_estimates(path: Path, runs: Sequence[str]) -> dict[str, MemoryEstimate]:
    """Return the memory estimate of each run.

    Raises:
        UserError: the file is missing or damaged, or has no estimate of a run.
    """
    fix = "run shardlab estimate"
    estimates = read_json(path, fix)
    for run in runs:
        if run not in estimates:
            raise UserError(f"{path}: has no run {run!r}: {fix}")
    try:
        return {run: validate(MemoryEstimate, estimates[run], str(path)) for run in runs}
    except UserError as error:
        raise UserError(f"{error}: {fix}") from None


def read_losses(results: Path, run: str, seed: int, fix: str = _FIX_TRAINING) -> pd.DataFrame:
    """Return the losses in the events of a training run, in nats per token, a row per step.

    Columns: loss (NaN where it was not finite), val_loss (NaN likewise), evaluated (whether there
    is a validation loss of the step).

    Args:
        results: folder with train/.
        fix: what the user should do when the file is missing or damaged.

    Raises:
        UserError: the file is missing or damaged, or an event has no step or loss.
    """
    path = results / "train" / run / f"seed{seed}" / "events.jsonl"
    fix = fix.format(run=run, seed=seed)
    events = read_json_lines(path, fix)
    try:
        steps = pd.Index([int(event["step"]) for event in events], name="step")
        values = [(event["loss"], event.get("val_loss")) for event in events]
        losses = pd.DataFrame(values, steps, ["loss", "val_loss"]).astype(float)
        return losses.assign(evaluated=["val_loss" in event for event in events])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the events of a training run ({error!r}): {fix}") from None


def join_record(
    results: Path,
    run: str,
    seed: int,
    *,
    params_hash: str,
    timed: Sequence[TimingResult],
    estimate: MemoryEstimate,
) -> TrainResult | Failure:
    """Return the record of one run and seed, or its crash.

    Args:
        params_hash: hash of the run's parameters, `RunPlan.params_hash`.
        results: folder that all stages write to.
        timed: runs of all timings.

    Raises:
        UserError: a file is missing or was not written by its stage, or the run had other
            parameters.
    """
    file = f"{run}/seed{seed}"
    training = _FIX_TRAINING.format(run=run, seed=seed)
    path = results / "train" / file / "metrics.json"
    metrics = read_failure(path, training) or Metrics.from_file(path, training)
    if metrics.params_hash != params_hash:
        raise UserError(f"{path}: of other parameters, as with --set: {training}")
    if isinstance(metrics, Failure):
        return metrics
    fix = f"run shardlab profile {run}"
    breakdown = Breakdown.from_file(results / "profile" / f"{file}.json", fix)
    fix = f"run shardlab validate {run}"
    validation = Validation.from_file(results / "validate" / f"{file}.json", fix)
    efficiency = scaling_efficiency(timed, metrics)
    joined = Joined(memory_estimate_bytes=estimate.total, scaling_efficiency=efficiency)
    values: dict[str, Any] = {}
    for part in (metrics, breakdown, validation, joined):
        values |= part.model_dump()
    return TrainResult(
        **{name: value for name, value in values.items() if name in TrainResult.model_fields}
    )


def write_csv(path: str | Path, records: Sequence[TrainResult]) -> None:
    """Write the records as CSV with a column for each field; nested values are JSON text."""
    # dtype object keeps numbers unchanged and leaves no cell empty
    rows = [table_row(record) for record in records]
    table = pd.DataFrame(rows, columns=list(TrainResult.model_fields), dtype=object)
    with atomic(path) as temporary:
        table.to_csv(temporary, index=False)
