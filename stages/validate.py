"""Measure perplexity and bits per byte of one trained model on the validation split."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.train.evaluation import validate_run
from stages import plans
from stages.common import integer, require, run


def main(params: Parameters, run: str, seed: str) -> None:
    """Write results/validate/RUN/seedS.json."""
    plan = plans.validate(params)
    folder = Path("results/train", run, f"seed{seed}")
    require(folder / "metrics.json", f"train --run {run} --seed {seed}")
    output = Path("results/validate", run, f"seed{seed}.json")
    validate_run(
        folder / "final_model", output, **plan, seed=integer("seed", seed), data=Path("data")
    )


if __name__ == "__main__":
    run(main)
