"""Measure perplexity and bits per byte of one trained model on the validation split."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.checksums import refuse_damage_of
from shardlab.train.evaluation import FILES, validate_run
from stages import plans
from stages.common import integer, run


def main(params: Parameters, run: str, seed: str) -> None:
    """Write results/validate/RUN/seedS.json."""
    plan = plans.validate(params)
    folder = Path("results/train", run, f"seed{seed}")
    fix = f"run python -m stages.train --run {run} --seed {seed}"
    files = [f"final_model/{name}" for name in FILES]
    refuse_damage_of(files, folder / "metrics.json", fix)
    output = Path("results/validate", run, f"seed{seed}.json")
    validate_run(
        folder / "final_model", output, **plan, seed=integer("seed", seed), data=Path("data")
    )


if __name__ == "__main__":
    run(main)
