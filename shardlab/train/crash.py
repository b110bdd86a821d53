"""Outputs of a run whose ranks failed, so that what follows goes on with the other runs."""

import shutil
from pathlib import Path

from shardlab.config.machine import connection_name
from shardlab.core.errors import RunFailed, shorten
from shardlab.core.files import write_text
from shardlab.core.launch_environment import node_count, rank_environment
from shardlab.results.run_record import Crash
from shardlab.train.plans import RunPlan

_OUTPUTS = ("events.jsonl", "trace.json.gz")
_MODEL = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def write_crash(plan: RunPlan, folder: Path, failure: RunFailed, log: str) -> Crash:
    """Write the outputs of `train_run` for a run that failed: metrics.json is its `Crash`, the
    other files are empty.

    Args:
        log: file with the whole error.

    Raises:
        RunFailed: `failure`, where the run is not to blame or may go on: somebody ended a rank, or
            torchrun or srun, which started the ranks, may start them again.
    """
    ranks = plan.train.world_size
    if failure.terminated or rank_environment(ranks) is not None:
        raise failure
    crash = Crash(
        run=plan.run,
        seed=plan.seed,
        world_size=ranks,
        link=connection_name(plan.train.link, node_count(ranks)),
        strategy=plan.strategy.canonical().model_dump(mode="json"),
        params_hash=plan.params_hash(),
        outcome=failure.outcome,
        crashed=f"{shorten(failure.summary)} (log: {log})",
    )
    # a model that was saved before the failure would look like one of a complete run
    shutil.rmtree(folder / "final_model", ignore_errors=True)
    for name in (*_OUTPUTS, *(f"final_model/{name}" for name in _MODEL)):
        write_text(folder / name, "")
    crash.to_file(folder / "metrics.json")  # last, as of any run
    return crash
