"""The record of a run from its files."""

from pathlib import Path

from shardlab.core.document import validate
from shardlab.core.files import read_json
from shardlab.profiling.breakdown import analyse
from shardlab.results.train_result import TrainResult
from shardlab.train.evaluation import validate_run
from shardlab.train.plans import RunPlan
from shardlab.train.run import train_run


def measure(plan: RunPlan, folder: Path) -> TrainResult:
    """Run `plan` in child processes and return its record; files are left in `folder`."""
    train_run(plan, folder)
    quality = folder / "validation.json"
    validate_run(folder / "final_model", quality, plan.train, plan.model, plan.seed, plan.data)
    parts = read_json(folder / "metrics.json"), read_json(quality)
    breakdown = analyse(folder / "trace.json.gz").model_dump()
    values = {key: part[key] for part in (*parts, breakdown) for key in part}
    return validate(TrainResult, values, str(folder))
