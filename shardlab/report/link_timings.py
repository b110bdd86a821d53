"""Timings that belong together because the rate of their link is all that differs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from shardlab.records.timing import NO_COMMUNICATION, TimedRun
from shardlab.report.timings import link_name, step_ratios
from shardlab.strategy.strategy import Strategy, parse_strategy


@dataclass(frozen=True)
class LinkTiming:
    """The runs of one timing."""

    name: str
    link: str
    bits_per_second: float
    """infinity without an emulated link"""
    runs: dict[str, TimedRun]
    """by name"""

    def ratio(self, run: str, reference: str) -> pd.Series:
        """Step time over that of `reference`: `mean`, `low` and `high`, NaN where not timed."""
        if run not in self.runs:
            return pd.Series(math.nan, index=["mean", "low", "high"])
        return step_ratios(list(self.runs.values()), reference).loc[run]

    def step_ms(self, run: str) -> float:
        """Mean over rounds; NaN where it was not timed."""
        return float(np.mean(self.runs[run].step_ms)) if run in self.runs else math.nan

    def fastest(self) -> str:
        """The run with the shortest step."""
        return min((run for run in self.runs if run != NO_COMMUNICATION), key=self.step_ms)


@dataclass(frozen=True)
class Crossover:
    """Timings that differ in the rate of the link alone, slowest first."""

    world_size: int
    delay_ms: float
    timings: list[LinkTiming]

    @property
    def title(self) -> str:
        """The ranks, and the delay where there is one."""
        delay = f", {self.delay_ms:g} ms of delay" if self.delay_ms else ""
        return f"{self.world_size} ranks{delay}"

    @property
    def runs(self) -> list[str]:
        """In the order in which they come."""
        return list(dict.fromkeys(run for timing in self.timings for run in timing.runs))

    @property
    def measured(self) -> list[LinkTiming]:
        """Those on links of known rates."""
        return [timing for timing in self.timings if math.isfinite(timing.bits_per_second)]

    def strategies(self) -> dict[str, Strategy]:
        """Normal forms by run, `NO_COMMUNICATION` left out."""
        documents = {name: run.strategy for t in self.timings for name, run in t.runs.items()}
        return {name: parse_strategy(each) for name, each in documents.items() if each is not None}


def crossovers(timed: Sequence[TimedRun]) -> list[Crossover]:
    """By number of ranks and delay, as far as a link was emulated."""
    by_timing: dict[str, dict[str, TimedRun]] = {}
    for run in timed:
        by_timing.setdefault(run.timing, {})[run.run] = run
    groups: dict[tuple[int, float], list[LinkTiming]] = {}
    for runs in by_timing.values():
        one = next(iter(runs.values()))
        rate = math.inf if one.bits_per_second is None else float(one.bits_per_second)
        timing = LinkTiming(one.timing, link_name(one), rate, runs)
        groups.setdefault((one.world_size, one.delay_ms), []).append(timing)
    found = [
        Crossover(*key, sorted(timings, key=lambda timing: (timing.bits_per_second, timing.name)))
        for key, timings in sorted(groups.items())
    ]
    return [group for group in found if group.measured]
