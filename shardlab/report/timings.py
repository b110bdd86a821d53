"""Timed runs to one row per timing and run, and timings grouped by the rate of their link.

The steps of one repetition follow each other directly, so two runs of a timing are compared
repetition by repetition; the uncertainty is that of these ratios, Student's t on their logarithms.
Ratios of runs of different timings have no interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from shardlab.config.contention import disturbed
from shardlab.config.machine import FRAME_HEADERS
from shardlab.config.run_record import Breakdown
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.report.aggregate import paired_ratio
from shardlab.report.tables import DISTURBED

_TRACED = ["profiled_step_ms", "comm_share", "exposed_comm_ms", "overlap", "backward_comm_share"]


def timing_table(timed: Sequence[TimedRun], baseline: str) -> pd.DataFrame:
    """Return one row per timing and run, the timings without an emulated link first.

    The order of timings in `timed` does not matter; runs of one timing keep theirs.

    Columns: timing, run, link, bits_per_second (NaN without an emulated link), world_size, threads,
    cores, repetitions, disturbed (whether others used its CPUs); `step_ms` and its standard
    deviation over repetitions `step_ms_sd`;
    `step_ratio` to the baseline of the same timing and `bound_ratio` to its no-communication bound,
    each with `_low` and `_high`; `tokens_per_s` over all ranks; `efficiency`, tokens per second and
    rank over those of the same run on one rank; `bytes_raw`, `bytes_wire`, `interface_bytes` and
    `interface_excess`, the fraction by which these, less the headers of frames, exceed
    `bytes_wire`; and the breakdown of the traced steps. Unknown values are NaN.
    """
    by_timing: dict[str, list[TimedRun]] = {}
    for run in sorted(timed, key=_order):
        by_timing.setdefault(run.timing, []).append(run)
    table = pd.concat([_rows(runs, baseline) for runs in by_timing.values()], ignore_index=True)
    return table.assign(efficiency=_efficiency(table))


def _order(run: TimedRun) -> tuple[int, float, int, str]:
    return run.bits_per_second or 0, run.delay_ms, run.world_size, run.timing


def link_name(run: TimedRun) -> str:
    """Return the name of the link in tables, which says where its emulation is in-process."""
    return f"{run.link} (in-process)" if run.link_emulation == "in-process" else run.link


def step_sd(run: TimedRun) -> float:
    """Return the standard deviation of the step time over repetitions; NaN for a single one."""
    return float(np.std(run.step_ms, ddof=1)) if len(run.step_ms) > 1 else math.nan


def step_ratios(runs: Sequence[TimedRun], reference: str) -> pd.DataFrame:
    """Return the step time of each run of a timing over that of `reference`, by `paired_ratio`.

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
        "repetitions": len(run.step_ms),
        "disturbed": disturbed(run.contention),
        "step_ms": step,
        "step_ms_sd": step_sd(run),
        "tokens_per_s": tokens / step * 1e3,
        "bytes_raw": run.bytes_raw,
        "bytes_wire": run.bytes_wire,
        "interface_bytes": counted,
        "interface_excess": payload / run.bytes_wire - 1 if run.bytes_wire else math.nan,
        **{name: getattr(traced, name) for name in _TRACED},
        "exposed_share": traced.exposed_comm_ms / traced.profiled_step_ms,
    }


def _efficiency(table: pd.DataFrame) -> pd.Series:
    # the batch of a rank is the same in all timings, so efficiency is the ratio of step times
    alone = table[(table["world_size"] == 1) & table["bits_per_second"].isna()]
    known = alone.drop_duplicates("run").set_index("run")["step_ms"]
    return table["run"].map(known).astype(float) / table["step_ms"]


@dataclass(frozen=True)
class LinkTiming:
    """Runs of one timing."""

    name: str
    link: str
    """for headings, with a mark if others used its CPUs"""
    bits_per_second: float
    """infinity without an emulated link"""
    runs: dict[str, TimedRun]
    """by name"""

    def ratio(self, run: str, reference: str) -> pd.Series:
        """Return step time over that of `reference`: `mean`, `low`, `high`; NaN if not timed."""
        if run not in self.runs:
            return pd.Series(math.nan, index=["mean", "low", "high"])
        return step_ratios(list(self.runs.values()), reference).loc[run]

    def step_ms(self, run: str) -> float:
        """Return the mean over repetitions; NaN if the run was not timed."""
        return float(np.mean(self.runs[run].step_ms)) if run in self.runs else math.nan

    def fastest(self) -> str:
        """Return the run with the shortest step, the no-communication bound left out."""
        return min((run for run in self.runs if run != NO_COMMUNICATION), key=self.step_ms)


def link_timing(runs: Sequence[TimedRun]) -> LinkTiming:
    """Return the runs of one timing as such."""
    one = runs[0]
    rate = math.inf if one.bits_per_second is None else float(one.bits_per_second)
    mark = f" {DISTURBED}" if any(disturbed(run.contention) for run in runs) else ""
    return LinkTiming(one.timing, link_name(one) + mark, rate, {run.run: run for run in runs})


@dataclass(frozen=True)
class Crossover:
    """Timings that differ in the rate of the link alone, slowest first."""

    world_size: int
    delay_ms: float
    timings: list[LinkTiming]

    @property
    def title(self) -> str:
        """Number of ranks, and the delay if there is one."""
        delay = f", {self.delay_ms:g} ms of delay" if self.delay_ms else ""
        return f"{self.world_size} ranks{delay}"

    @property
    def runs(self) -> list[str]:
        """Names of the runs, in the order in which they were timed."""
        return list(dict.fromkeys(run for timing in self.timings for run in timing.runs))

    @property
    def measured(self) -> list[LinkTiming]:
        """Timings on links of known rates."""
        return [timing for timing in self.timings if math.isfinite(timing.bits_per_second)]

    def strategies(self) -> dict[str, Strategy]:
        """Return the strategies by run, `NO_COMMUNICATION` left out."""
        documents = {name: run.strategy for t in self.timings for name, run in t.runs.items()}
        return {name: parse_strategy(each) for name, each in documents.items() if each is not None}


def crossovers(timed: Sequence[TimedRun]) -> list[Crossover]:
    """Group timings by number of ranks and delay; groups without an emulated link are left out."""
    by_timing: dict[str, list[TimedRun]] = {}
    for run in timed:
        by_timing.setdefault(run.timing, []).append(run)
    groups: dict[tuple[int, float], list[LinkTiming]] = {}
    for runs in by_timing.values():
        ranks_and_delay = runs[0].world_size, runs[0].delay_ms
        groups.setdefault(ranks_and_delay, []).append(link_timing(runs))
    found = [
        Crossover(
            world_size=world_size,
            delay_ms=delay_ms,
            timings=sorted(timings, key=lambda timing: (timing.bits_per_second, timing.name)),
        )
        for (world_size, delay_ms), timings in sorted(groups.items())
    ]
    return [group for group in found if group.measured]


def without_link(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `timing_table` without an emulated link."""
    return rows[rows["bits_per_second"].isna()]


def speed_up(ratios: pd.Series) -> pd.Series:
    """Return the speed-up with its interval from a ratio of step times with its interval."""
    ends = {"mean": "mean", "low": "high", "high": "low"}
    return pd.Series({key: 1 / ratios[end] for key, end in ends.items()})
