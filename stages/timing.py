"""Time interleaved steps of the strategies of one timing, on ranks of its own."""

from pathlib import Path

from shardlab.experiment.parameters import Parameters
from shardlab.timing.interleaved import time_strategies
from shardlab.timing.plan import TimingPlan
from stages import plans
from stages.common import run as run_stage


def main(params: Parameters, name: str) -> None:
    """Write results/timings/NAME.jsonl: a line per run, and one for steps without communication."""
    plan = TimingPlan(name, **plans.timing(params, name))
    time_strategies(plan, Path("results/timings", f"{name}.jsonl"))


if __name__ == "__main__":
    run_stage(main)
