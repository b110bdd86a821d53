"""Break the profiled steps of a run down into compute, communication, copies and idle time.

Given files in place of a run (python -m stages.profile TRACE...), break down any traces of
torch.profiler, labelled or not, and print a line per rank and what is unknown.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from shardlab.config.parameters import Parameters
from shardlab.config.run_record import read_crash
from shardlab.core.errors import UserError
from shardlab.core.files import atomic, write_text
from shardlab.core.progress import say
from shardlab.profiling.breakdown import StepTimes, read_steps, summarize
from shardlab.profiling.job import break_down
from shardlab.profiling.table import render
from stages.common import Parser, require, run

_COMMAND = "python -m stages.profile"
_USAGE = f"{_COMMAND} RUN [--params FILE] [--set KEY=VALUE] | [--csv FILE] TRACE..."

_NAME = re.compile("[a-z0-9][a-z0-9-]*")


def main(params: Parameters, run: str) -> None:
    """Write results/profile/RUN/seedS.csv, a row per step and rank, and the means in seedS.json,
    for every seed."""
    for seed in params("seeds"):
        _break_down_run(run, seed)


def _break_down_run(run: str, seed: int) -> None:
    folder = Path("results/train", run, f"seed{seed}")
    require(folder / "metrics.json", f"train --run {run} --seed {seed}")
    output = Path("results/profile", run)
    crash = read_crash(folder / "metrics.json", f"run python -m stages.train --run {run}")
    if crash is not None:
        write_text(output / f"{folder.name}.csv", "")
        crash.to_file(output / f"{folder.name}.json")
        return
    steps = read_steps(folder / "trace.json.gz")
    mean = summarize(steps)
    write_rows(output / f"{folder.name}.csv", steps)
    mean.to_file(output / f"{folder.name}.json")
    say(
        f"{run} seed {seed}: step {mean.profiled_step_ms:.1f} ms, "
        f"communication {mean.comm_share:.0%} of it, {mean.overlap:.0%} overlapped"
    )


def write_rows(path: Path, steps: Sequence[StepTimes]) -> None:
    """Write one row per step and rank; times by operation and by unit as JSON text."""
    table = pd.DataFrame([vars(step) for step in steps])
    for name in table.filter(like="_by_"):
        table[name] = [json.dumps(times, sort_keys=True) for times in table[name]]
    with atomic(path) as temporary:
        table.to_csv(temporary, index=False)


def of_traces(arguments: Sequence[str]) -> None:
    """Print the breakdown of the traces of a job; `--csv FILE` writes a row per step and rank."""
    parser = Parser("profile", description=__doc__)
    parser.usage = _USAGE
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="of a rank or merged, also .gz, or a folder of traces",
    )
    parser.add_argument("--csv", metavar="FILE", help="write a row per step and rank")
    options = parser.parse_args(arguments)
    try:
        job = break_down(options.traces)
        if options.csv is not None:
            write_rows(Path(options.csv), job.steps)
    except UserError as error:
        say(f"profile: error: {error}")
        sys.exit(2)
    print("\n".join(render(job)))


def names_run(arguments: Sequence[str]) -> bool:
    """Return whether the arguments are RUN, and no path, with options of every stage."""
    parser = Parser("profile", description=None)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--params")
    parser.add_argument("--set", action="append")
    options, others = parser.parse_known_intermixed_args(arguments)
    if others or len(options.words) != 1:
        return False
    (word,) = options.words
    return _NAME.fullmatch(word) is not None and not Path(word).exists()


if __name__ == "__main__":
    if names_run(sys.argv[1:]):
        run(main)
    else:
        of_traces(sys.argv[1:])
