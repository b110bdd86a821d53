"""Where the time of one run's profiled steps went: compute, communication, overlap, idle."""

from pathlib import Path

from shardlab.core.files import write_json
from shardlab.core.params import Parameters
from shardlab.core.progress import say
from shardlab.profiling.breakdown import analyse
from stages.common import integer, run


def main(params: Parameters, run: str, seed: str) -> None:
    """Writes results/profile/RUN/seedS.json."""
    seed_name = f"seed{integer('seed', seed)}"
    breakdown = analyse(Path("results/train", run, seed_name, "trace.json.gz"))
    write_json(Path("results/profile", run, f"{seed_name}.json"), breakdown.model_dump(mode="json"))
    say(
        f"{run} seed {seed}: step {breakdown.profiled_step_ms:.1f} ms, "
        f"communication {breakdown.comm_share:.0%} of it, {breakdown.overlap:.0%} overlapped"
    )


if __name__ == "__main__":
    run(main)
