"""Train one run of the matrix with one seed, on local ranks or as one rank of torchrun or srun."""

from pathlib import Path
from typing import Annotated

from shardlab.core.document import validate
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Seed
from shardlab.loop.plan import RunPlan, plan_of_missing_tokens
from shardlab.train.run import train_run
from shardlab.train.utilization import show_placements
from stages import plans
from stages.common import run as run_stage


def main(
    params: Parameters,
    *,
    run: Annotated[str, "name of a strategy in the parameters"],
    seed: Annotated[int, "of the weights, the order of the data and random codecs"] = 0,
    max_restarts: Annotated[int, "how often to start new ranks after one has failed"] = 0,
    show_placement: Annotated[bool, "print which CPUs and memory each rank gets, and end"] = False,
) -> None:
    """Write metrics.json, events.jsonl, trace.json.gz and final_model/ of the run."""
    values = plans.train(params, run)
    if show_placement:
        show_placements(values["train"])
        return
    data = Path("data")
    tokens = plan_of_missing_tokens(data, params)
    plan = RunPlan(run, validate(Seed, seed, "--seed"), **values, data=data, tokens=tokens)
    subfolder = Path(run, f"seed{seed}")
    train_run(
        plan,
        "results/train" / subfolder,
        telemetry="logs/tensorboard" / subfolder,
        checkpoints=".work/checkpoints" / subfolder,
        max_restarts=max_restarts,
    )


if __name__ == "__main__":
    run_stage(main, log=("run", "seed"))
