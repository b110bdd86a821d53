"""Break the profiled steps of a run down into compute, communication, copies and idle time."""

from pathlib import Path

from shardlab.core.files import write_text
from shardlab.core.progress import say
from shardlab.profiling.breakdown import read_steps, summarize
from shardlab.profiling.table import write_rows
from shardlab.results.files import read_failure
from stages.common import require
from stages.sections import Sections


def main(params: Sections, run: str) -> None:
    """Write results/profile/RUN/seedS.csv, a row per step and rank, and the means in seedS.json,
    for every seed."""
    for seed in params("seeds", list[int]):
        break_down(Path("results"), run, seed)


def break_down(results: Path, run: str, seed: int) -> None:
    """Write what the stage writes of one seed.

    Args:
        results: folder with train/, for profile/.
    """
    folder = results / "train" / run / f"seed{seed}"
    require(folder / "metrics.json", f"train --run {run} --seed {seed}")
    output = results / "profile" / run
    crash = read_failure(folder / "metrics.json", f"run shardlab train --run {run}")
    if crash is not None:
        write_text(output / f"{folder.name}.csv", "")
        crash.to_file(output / f"{folder.name}.json")
        return
    steps = read_steps(folder / "trace.json.gz")
    mean = summarize(steps)
    write_rows(output / f"{folder.name}.csv", steps)
    mean.to_file(output / f"{folder.name}.json")
    say(
        f"profile {run} seed {seed}: step {mean.profiled_step_ms:.1f} ms, "
        f"communication {mean.comm_share:.0%} of it, {mean.overlap:.0%} overlapped"
    )
