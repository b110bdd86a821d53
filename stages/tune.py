"""Tune a method, and train it until it reaches the loss of `tune`."""

from pathlib import Path

from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.train.settings import Train
from shardlab.train.tune import Tuning, tune_method
from shardlab.train.tune_settings import Method, Tune
from stages.common import SAMPLES, refuse_other_source, refuse_other_tokens
from stages.sections import Sections

_USED = (
    *("world_size", "threads", "placement", "deterministic", "steps", "learning_rate"),
    *("warmup_steps", "decay", "weight_decay", "betas", "clip", "optimizer"),
)
"""of `train`, besides the size of its steps, and what changes no result"""


def main(params: Sections, method: str) -> None:
    """Write results/tune/METHOD.jsonl: a line for each run.

    It grows in .work/tune/METHOD, run by run, so that a search that was killed goes on from there.
    """
    options = params(f"methods.{method}", Method)
    refuse_other_source(params)
    refuse_other_tokens(params)
    strategies = params.plain("strategies") | params.plain("timed_strategies")
    tuning = Tuning(
        method,
        options,
        parse_strategy(strategies[options.strategies[0]]),
        params("tune", Tune),
        params("train", Train, *SAMPLES, *_USED, "untimed_steps", "timeout_s"),
        params("model", Model),
        options.seeds or params("seeds", list[int]),
    )
    tune_method(tuning, Path("results/tune", f"{method}.jsonl"), Path(".work/tune", method))
