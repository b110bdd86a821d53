"""Time interleaved steps of the strategies of one timing, and of those it is interleaved with."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.train.timing_plan import TimingPlan
from shardlab.train.together import time_strategies
from stages import plans
from stages.common import run as run_stage


def main(params: Parameters, name: str) -> None:
    """Write results/timings/NAME.jsonl: a line per run, and one for steps without communication,
    of each timing."""
    values = plans.timing(params, name)
    parts = values.pop("timing").parts(name)
    timings = [TimingPlan(part, timing, **values) for part, timing in parts.items()]
    time_strategies(timings, Path("results/timings", f"{name}.jsonl"))


if __name__ == "__main__":
    run_stage(main)
