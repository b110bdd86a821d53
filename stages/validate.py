"""Measure perplexity and bits per byte of one trained model on the validation split."""

from pathlib import Path

from shardlab.evaluation.validate import validate_run
from shardlab.experiment.parameters import Parameters
from stages.common import integer, run


def main(params: Parameters, run: str, seed: str) -> None:
    """Write results/validate/RUN/seedS.json."""
    train, model = params("train", "model")
    folder = Path("results/train", run, f"seed{seed}", "final_model")
    output = Path("results/validate", run, f"seed{seed}.json")
    validate_run(folder, output, train, model, integer("seed", seed), Path("data"))


if __name__ == "__main__":
    run(main)
