"""Files that a stage leaves for later stages; an error names the stage to run."""

import math
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

from shardlab.config.run_record import Estimate
from shardlab.core.document import Document, validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json, read_json_lines

D = TypeVar("D", bound=Document)


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
    found = read_json(path, fix)
    if run not in found:
        raise UserError(f"{path}: has no run {run!r}: {fix}")
    try:
        return validate(Estimate, found[run], str(path))
    except UserError as error:
        raise UserError(f"{error}: {fix}") from None


def read_loss_curve(results: Path, run: str, seed: int) -> LossCurve:
    """Return the loss curve in the events of a training run.

    Raises:
        UserError: the file is missing or damaged, or an event has no step, loss or time.
    """
    path = results / "train" / run / f"seed{seed}" / "events.jsonl"
    fix = _fix(train_stage(run, seed))
    events = read_json_lines(path, fix)
    try:
        return LossCurve(
            steps=[int(event["step"]) for event in events],
            losses=[math.nan if event["loss"] is None else event["loss"] for event in events],
            seconds=[*accumulate(event["step_ms"] / 1e3 for event in events)],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: not the events of a training run ({error!r}): {fix}") from None


def train_stage(run: str, seed: int) -> str:
    """Return the train stage of one run and seed with its arguments."""
    return f"train --run {run} --seed {seed}"


def _fix(stage: str) -> str:
    return f"run python -m stages.{stage}"
