"""Outputs of a run whose ranks failed, so that what follows goes on with the other runs."""

import shutil
from pathlib import Path

from shardlab.core.errors import RunFailed, shorten
from shardlab.core.files import write_text
from shardlab.core.launch_environment import rank_environment
from shardlab.results.result import Failure
from shardlab.train.header import failure
from shardlab.train.plans import RunPlan

_OUTPUTS = ("events.jsonl", "trace.json.gz")
_MODEL = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def write_crash(plan: RunPlan, folder: Path, error: RunFailed, log: str) -> Failure:
    """Write the outputs of `train_run` for a run that failed: metrics.json is a `Failure`, the
    other files are empty.

    Args:
        log: file with the whole error.

    Raises:
        RunFailed: `error`, where the run is not to blame or may go on: somebody ended a rank, or
            torchrun or srun, which started the ranks, may start them again.
    """
    if error.terminated or rank_environment(plan.train.world_size) is not None:
        raise error
    detail = f"{shorten(error.summary)} (log: {log})"
    crash = failure(plan, plan.run, error.outcome, detail)
    # a model that was saved before the failure would look like one of a complete run
    shutil.rmtree(folder / "final_model", ignore_errors=True)
    for name in (*_OUTPUTS, *(f"final_model/{name}" for name in _MODEL)):
        write_text(folder / name, "")
    crash.to_file(folder / "metrics.json")  # last, as of any run
    return crash
