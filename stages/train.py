"""Train one run of the matrix with one seed, on local ranks or on several nodes."""

from pathlib import Path
from typing import Annotated

from shardlab.core.document import validate
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Seed
from shardlab.launch import Start
from shardlab.loop.plan import RunPlan
from shardlab.train.placed import show_placements
from shardlab.train.run import train_run
from stages.common import run as run_stage


def main(
    params: Parameters,
    *,
    run: Annotated[str, "name of a strategy in the parameters"],
    seed: Annotated[int, "of the weights, the order of the data and random codecs"] = 0,
    nnodes: Annotated[int, "nodes, on each of which this command starts an equal share"] = 1,
    node_rank: Annotated[int, "number of this node, from 0 on"] = 0,
    master: Annotated[str | None, "HOST:PORT of node 0, the same on every node"] = None,
    max_restarts: Annotated[int, "how often to begin again after a rank has failed"] = 0,
    show_placement: Annotated[bool, "say which CPUs and memory each rank gets, and end"] = False,
) -> None:
    """Write metrics.json, events.jsonl, trace.json.gz and final_model/ of the run."""
    strategy, train, model = params(f"strategies.{run}", "train", "model")
    start = Start(nnodes, node_rank, master, max_restarts)
    if show_placement:
        show_placements(train, start)
        return
    plan = RunPlan(run, validate(Seed, seed, "--seed"), strategy, train, model)
    place = Path(run, f"seed{seed}")
    train_run(
        plan,
        "results/train" / place,
        telemetry="logs/tensorboard" / place,
        checkpoints=".work/checkpoints" / place,
        start=start,
    )


if __name__ == "__main__":
    run_stage(main, log=("run", "seed"))
