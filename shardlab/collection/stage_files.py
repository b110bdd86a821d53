"""Files that a stage leaves for later stages; an error names the stage to run."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, read_json_lines
from shardlab.records.run import Estimate

D = TypeVar("D", bound=Document)
T = TypeVar("T")


class LossCurve(NamedTuple):
    """Training loss of one run and seed; one entry for each step."""

    steps: list[int]
    losses: list[float]
    """nats per token"""
    seconds: list[float]
    """training time until the end of the step"""


def read_document(kind: type[D], path: Path, stage: str) -> D:
    """Return the document of `kind` that a stage wrote as JSON.

    Args:
        stage: module of `stages` that writes the file, with its arguments.

    Raises:
        UserError: the file is missing or holds something else.
    """
    return _check(kind, _read_json(path, stage), path, stage)


def read_estimate(path: Path, run: str) -> Estimate:
    """Return the memory estimate of one run.

    Raises:
        UserError: the file is missing or has no estimate of the run.
    """
    stage = "estimate"
    found = _read_json(path, stage)
    if not isinstance(found, dict) or run not in found:
        raise UserError(f"{path}: has no run {run!r}: {_fix(stage)}")
    return _check(Estimate, found[run], path, stage)


def read_loss_curve(results: Path, run: str, seed: int) -> LossCurve:
    """Return the loss curve in the events of a training run.

    Raises:
        UserError: the file is missing, or an event has no step, loss or time.
    """
    path, stage = results / "train" / run / f"seed{seed}" / "events.jsonl", train_stage(run, seed)
    try:
        events = _read(path, stage, read_json_lines)
        return LossCurve(
            steps=[int(event["step"]) for event in events],
            losses=[float(event["loss"]) for event in events],
            seconds=[*accumulate(event["step_ms"] / 1e3 for event in events)],
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, UserError):  # which is a ValueError
            raise
        raise UserError(
            f"{path}: not the events of a training run ({error!r}): {_fix(stage)}"
        ) from None


def train_stage(run: str, seed: int) -> str:
    """Return the train stage of one run and seed with its arguments."""
    return f"train --run {run} --seed {seed}"


def _read_json(path: Path, stage: str) -> Any:
    try:
        return _read(path, stage, read_json)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not JSON ({error}): {_fix(stage)}") from None


def _check(kind: type[D], value: Any, path: Path, stage: str) -> D:
    try:
        document: D = validate(kind, value, str(path))
    except UserError as error:
        raise UserError(f"{error}: {_fix(stage)}") from None
    return document


def _read(path: Path, stage: str, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file: {_fix(stage)}") from None


def _fix(stage: str) -> str:
    return f"run python -m stages.{stage}"
