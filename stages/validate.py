"""Measure perplexity and bits per byte of the models of a run on the validation split."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.checksums import refuse_damage_of
from shardlab.train.evaluation import FILES, validate_run
from stages.common import run


def main(params: Parameters, run: str) -> None:
    """Write results/validate/RUN/seedS.json for every seed."""
    train, model, seeds = params("train", "model", "seeds")
    train = train.only("threads", "placement", "sequence_length")
    files = [f"final_model/{name}" for name in FILES]
    for seed in seeds:
        folder = Path("results/train", run, f"seed{seed}")
        fix = f"run python -m stages.train --run {run} --seed {seed}"
        refuse_damage_of(files, folder / "metrics.json", fix)
        output = Path("results/validate", run, f"seed{seed}.json")
        validate_run(folder / "final_model", output, train, model, seed, Path("data"))


if __name__ == "__main__":
    run(main)
