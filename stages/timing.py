"""Time interleaved steps of the strategies of one timing, and of those it is interleaved with."""

from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.lock import is_job
from shardlab.models.settings import Model
from shardlab.results.settings import Timing
from shardlab.results.timing_parts import parts
from shardlab.strategy.document import parse_strategy
from shardlab.train.interleaved import time_strategies
from shardlab.train.plans import TimingPlan
from shardlab.train.settings import Train
from stages.common import SAMPLES, refuse_other_tokens
from stages.sections import Sections

_USED = (
    *("threads", "placement", "deterministic", "optimizer", "weight_decay", "clip"),
    "profiled_steps",
)
"""of `train`, besides the size of its steps and a limit that changes no result"""


def main(params: Sections, name: str) -> None:
    """Write results/timings/NAME.jsonl: a line per run, and one for steps without communication,
    of each timing.

    As a job of Snakemake or DVC, a run in whose steps ranks fail is left out, and has a line that
    says so.
    """
    timings = params("timings", dict[str, Timing])
    for whole, timing in timings.items():
        if name in timing.interleaved:
            raise UserError(f"timing {name} is part of timing {whole}: name that")
    refuse_other_tokens(params)
    timing, model = params(f"timings.{name}", Timing), params("model", Model)
    train = params("train", Train, *SAMPLES, *_USED, "timeout_s")
    documents = params.plain("strategies") | params.plain("timed_strategies")
    strategies = {key: parse_strategy(document) for key, document in documents.items()}
    plans = [
        TimingPlan(part, repetitions, strategies, train, model)
        for part, repetitions in parts(timing, name).items()
    ]
    output = Path("results/timings", f"{name}.jsonl")
    time_strategies(plans, output, leave_out=is_job())
