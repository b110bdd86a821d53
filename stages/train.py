"""Trains one run of the matrix with one seed, on ranks of its own or those of torchrun."""

from pathlib import Path

from shardlab.core.params import Parameters
from shardlab.train.plan import RunPlan
from shardlab.train.run import train_run
from stages.common import integer, run


def main(params: Parameters, run: str, seed: str) -> None:
    """Writes metrics.json, events.jsonl, trace.json.gz and final_model/ of the run."""
    strategy, train, model = params(f"strategies.{run}", "train", "model")
    plan = RunPlan(run, integer("seed", seed), strategy, train, model)
    place = Path(run, f"seed{seed}")
    train_run(
        plan,
        "results/train" / place,
        telemetry="logs/tensorboard" / place,
        checkpoints=".work/checkpoints" / place,
    )


if __name__ == "__main__":
    run(main)
