"""From timed runs to one row per timing and run.

Steps of one round were made one right after another, so two runs of a timing are compared round by
round, and the uncertainty is that of these ratios: Student's t on their logarithms. Runs of
different timings were not, and their ratios have no interval.
"""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from shardlab.experiment.link import FRAME_HEADERS
from shardlab.records.run import Breakdown
from shardlab.records.timing import NO_COMMUNICATION, TimedRun
from shardlab.report.aggregate import paired_ratio

_TRACED = ["profiled_step_ms", "comm_share", "exposed_comm_ms", "overlap", "backward_comm_share"]


def timing_table(timed: Sequence[TimedRun], baseline: str) -> pd.DataFrame:
    """One row per timing and run, the timings without a link first.

    Their order in `timed` has no meaning, other than of the runs of one timing.

    Columns: timing, run, link, bits_per_second (NaN without an emulated link), world_size, threads,
    cores, rounds; `step_ms` and its standard deviation over rounds `step_ms_sd`; `step_ratio` to
    the baseline of the same timing and `bound_ratio` to its steps without communication, each with
    `_low` and `_high`; `tokens_per_s` over all ranks; `efficiency`, tokens per second and rank
    against the same run on one rank; `bytes_raw`, `bytes_wire`, `interface_bytes` and
    `interface_excess`, by what share those are more without the headers of frames; and what the
    traced steps say.
    What is not known is NaN.
    """
    by_timing: dict[str, list[TimedRun]] = {}
    for run in sorted(timed, key=_place):
        by_timing.setdefault(run.timing, []).append(run)
    table = pd.concat([_rows(runs, baseline) for runs in by_timing.values()], ignore_index=True)
    return table.assign(efficiency=_efficiency(table))


def _place(run: TimedRun) -> tuple[int, float, int, str]:
    return run.bits_per_second or 0, run.delay_ms, run.world_size, run.timing


def link_name(run: TimedRun) -> str:
    """As tables call the link; where ranks hold their own bytes back, that is said."""
    return f"{run.link} (in-process)" if run.link_emulation == "in-process" else run.link


def step_ratios(runs: Sequence[TimedRun], reference: str) -> pd.DataFrame:
    """Step time of each run of one timing over that of `reference`: `paired_ratio` by rounds.

    NaN where the timing has no such run.
    """
    steps = pd.DataFrame({run.run: run.step_ms for run in runs})
    if reference not in steps:
        return pd.DataFrame(math.nan, index=steps.columns, columns=["mean", "low", "high"])
    return paired_ratio(steps, reference)


def _rows(runs: list[TimedRun], baseline: str) -> pd.DataFrame:
    rows = pd.DataFrame([_row(run) for run in runs])
    for name, reference in (("step_ratio", baseline), ("bound_ratio", NO_COMMUNICATION)):
        ratios = step_ratios(runs, reference)
        for column, end in (("mean", ""), ("low", "_low"), ("high", "_high")):
            rows[f"{name}{end}"] = ratios[column].to_numpy()
    return rows


def _row(run: TimedRun) -> dict[str, object]:
    step = float(np.mean(run.step_ms))
    tokens = run.world_size * run.batch_size * run.accumulation * run.sequence_length
    counted = math.nan if run.interface_bytes is None else run.interface_bytes
    payload = counted - FRAME_HEADERS * (run.interface_frames or 0)
    traced: Breakdown = run.breakdown
    return {
        "timing": run.timing,
        "run": run.run,
        "link": link_name(run),
        "bits_per_second": math.nan if run.bits_per_second is None else run.bits_per_second,
        "world_size": run.world_size,
        "threads": run.threads,
        "cores": run.host["cores"],
        "rounds": len(run.step_ms),
        "step_ms": step,
        "step_ms_sd": float(np.std(run.step_ms, ddof=1)) if len(run.step_ms) > 1 else math.nan,
        "tokens_per_s": tokens / step * 1e3,
        "bytes_raw": run.bytes_raw,
        "bytes_wire": run.bytes_wire,
        "interface_bytes": counted,
        "interface_excess": payload / run.bytes_wire - 1 if run.bytes_wire else math.nan,
        **{name: getattr(traced, name) for name in _TRACED},
        "exposed_share": traced.exposed_comm_ms / traced.profiled_step_ms,
    }


def _efficiency(table: pd.DataFrame) -> pd.Series:
    """The batch of a rank is the same everywhere, so it is the ratio of the step times."""
    alone = table[(table["world_size"] == 1) & table["bits_per_second"].isna()]
    known = alone.drop_duplicates("run").set_index("run")["step_ms"]
    return table["run"].map(known).astype(float) / table["step_ms"]
