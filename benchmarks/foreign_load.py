"""Ratios of step times while a foreign process computes on one core, compared with those without.

    python -m benchmarks.foreign_load [--params FILE] [--repetitions N] [--data FOLDER]
        [--work FOLDER]

The timing `comparison` of an experiment runs twice: the second time a process that only computes
runs beside it. Changes of ratios contain the uncertainty of both timings.
"""

import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.common import DATA, WORK, arguments, print_table, write_results
from shardlab.config.parameters import Parameters
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun, read_timings
from shardlab.report.numbers import fixed, ratio
from shardlab.report.timings import timing_table
from shardlab.train.timing_plan import TimingPlan
from shardlab.train.together import time_strategies

RATIO_GOAL, INTERVAL_GOAL = 0.05, 0.10
"""largest change of a ratio, and half the width of an interval relative to the ratio"""
# ends with its parent, however that ends
_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def main() -> None:
    given = arguments(
        __doc__,
        params=(Path("params.yaml"), "experiment"),
        repetitions=(0, "of the timing; 0: those of the experiment"),
        data=DATA,
        work=WORK,
    )
    params = Parameters(given.params)
    name, baseline = params("comparison", "baseline")
    timing, train, model = params(f"timings.{name}", "train", "model")
    runs, timed = params("strategies", "timed_strategies")
    strategies = {**runs, **timed}
    if given.repetitions:
        timing = timing.model_copy(update={"repetitions": given.repetitions})
    plan = TimingPlan(name, timing, strategies, train, model, given.data)
    quiet = _timed(plan, given.work / "foreign_load_quiet.jsonl")
    with foreign_process():
        loaded = _timed(plan, given.work / "foreign_load.jsonl")
    rows = changes(*(timing_table(runs, baseline) for runs in (quiet, loaded)))
    _show(rows.drop(index=[baseline, NO_COMMUNICATION]), quiet, loaded)
    results = rows.reset_index().to_dict("records")
    write_results(given.work / "foreign_load.json", rows=results, baseline=baseline)


@contextmanager
def foreign_process() -> Iterator[None]:
    """Run a process that computes on one core."""
    with subprocess.Popen([sys.executable, "-c", _BUSY]) as busy:
        try:
            yield
        finally:
            busy.kill()


def changes(quiet: pd.DataFrame, loaded: pd.DataFrame) -> pd.DataFrame:
    """Return ratios to the baseline without and with the foreign process, by run.

    Columns: for each of both the ratio, `_low` and `_high` of its interval, and `_width`, half the
    interval relative to the ratio; `change`, the second ratio over the first, minus 1.

    Args:
        quiet: `timings.timing_table` of one timing, as `loaded`.
    """
    parts = {}
    for name, table in (("quiet", quiet), ("loaded", loaded)):
        rows = table.set_index("run")
        for end in ("", "_low", "_high"):
            parts[f"{name}{end}"] = rows[f"step_ratio{end}"]
        ends = rows["step_ratio_high"] / rows["step_ratio_low"]
        parts[f"{name}_width"] = ends**0.5 - 1
    found = pd.DataFrame(parts)
    return found.assign(change=found["loaded"] / found["quiet"] - 1)


def _timed(plan: TimingPlan, path: Path) -> list[TimedRun]:
    path.parent.mkdir(parents=True, exist_ok=True)
    time_strategies([plan], path)
    return read_timings(path, "run the benchmark again")


def _show(rows: pd.DataFrame, quiet: list[TimedRun], loaded: list[TimedRun]) -> None:
    cells = [
        [
            str(run),
            *(
                ratio(*(row[f"{name}{end}"] for end in ("", "_low", "_high")), places=3)
                for name in ("quiet", "loaded")
            ),
            *(fixed(100 * row[name], 1) for name in ("change", "quiet_width", "loaded_width")),
        ]
        for run, row in rows.iterrows()
    ]
    headings = ["run", "quiet", "loaded", "change, %", "quiet, ± %", "loaded, ± %"]
    print_table("Step time over that of the baseline", headings, cells)
    for name, runs in (("quiet", quiet), ("loaded", loaded)):
        print(f"{name}: {runs[0].contention or 'the load of others is unknown'}")
    change = rows["change"].abs().max()
    width = rows["loaded_width"].max()
    for what, value, goal in (("change", change, RATIO_GOAL), ("interval ±", width, INTERVAL_GOAL)):
        met = "met" if value <= goal else "missed"
        print(f"largest {what}: {_percent(value)}; the goal of {_percent(goal)} is {met}")


def _percent(value: Any) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "unknown"


if __name__ == "__main__":
    main()
