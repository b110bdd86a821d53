"""Measure perplexity and bits per byte of the models of a run on the validation split."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.config.run_record import read_crash
from shardlab.train.evaluation import validate_run
from stages.common import refuse_other_tokens, require
from stages.common import run as run_stage


def main(params: Parameters, run: str) -> None:
    """Write results/validate/RUN/seedS.json for every seed."""
    refuse_other_tokens(params)
    train, model, seeds = params("train", "model", "seeds")
    train = train.only("threads", "placement", "sequence_length")
    for seed in seeds:
        folder = Path("results/train", run, f"seed{seed}")
        require(folder / "metrics.json", f"train --run {run} --seed {seed}")
        crash = read_crash(folder / "metrics.json", f"run python -m stages.train --run {run}")
        output = Path("results/validate", run, f"seed{seed}.json")
        if crash is not None:
            crash.to_file(output)
            continue
        validate_run(folder / "final_model", output, train, model, seed, Path("data"))


if __name__ == "__main__":
    run_stage(main)
