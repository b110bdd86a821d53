"""Whole record of a strategy: train, analyse the trace, validate."""

from pathlib import Path

from shardlab.core.document import validate
from shardlab.core.files import read_json
from shardlab.evaluation.validate import validate_run
from shardlab.loop.plan import RunPlan
from shardlab.profiling.analysis.breakdown import analyse
from shardlab.records.run import Record
from shardlab.train.run import train_run


def measure(plan: RunPlan, folder: Path, timeout_s: float | None = None) -> Record:
    """Run `plan` in child processes and return its record; files are left in `folder`.

    Raises:
        RunFailed: crash, lack of memory, or more than `timeout_s` seconds of training.
    """
    train_run(plan, folder, limit_s=timeout_s)
    quality = folder / "validation.json"
    validate_run(folder / "final_model", quality, plan.train, plan.model, plan.seed, plan.data)
    return validate(
        Record,
        {
            **read_json(folder / "metrics.json"),
            **analyse(folder / "trace.json.gz").model_dump(),
            **read_json(quality),
        },
        str(folder),
    )
