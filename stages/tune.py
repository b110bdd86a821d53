"""Tune a method, and train it until it reaches the loss of `tune`."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.train.tune import Tuning, tune_method
from stages.common import refuse_other_source, refuse_other_tokens
from stages.common import run as run_stage


def main(params: Parameters, method: str) -> None:
    """Write results/tune/METHOD.jsonl: a line for each run.

    It grows in .work/tune/METHOD, run by run, so that a search that was killed goes on from there.
    """
    options = params(f"methods.{method}")
    tune, train, model, seeds = params("tune", "train", "model", "seeds")
    refuse_other_source(params)
    refuse_other_tokens(params)
    tuning = Tuning(
        method,
        options,
        params.all_strategies()[options.strategies[0]],
        tune,
        train,
        model,
        options.seeds or seeds,
    )
    tune_method(tuning, Path("results/tune", f"{method}.jsonl"), Path(".work/tune", method))


if __name__ == "__main__":
    run_stage("tune", main)
