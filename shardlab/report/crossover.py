"""What the rate of a link changes: which run is fastest, and where each codec stops paying.

A codec pays as long as a step is shorter than that of the same strategy without a codec. The rate
at which it stops is interpolated between two measured ones: logarithm of the ratio of step times
over logarithm of the rate.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from shardlab.core.strategy import Strategy, parse_strategy
from shardlab.core.timings import NO_COMMUNICATION, TimedRun
from shardlab.report.cells import RUN, Column, Row
from shardlab.report.numbers import ABSENT, figure, plus_minus
from shardlab.report.tables import Table, run_table
from shardlab.report.timing_columns import ratio
from shardlab.report.timings import step_ratios

UNLIMITED = "no emulated link"


@dataclass(frozen=True)
class LinkTiming:
    """The runs of one timing, by name."""

    link: str
    bits_per_second: float
    """infinity without an emulated link"""
    runs: dict[str, TimedRun]

    def ratio(self, run: str, reference: str) -> pd.Series:
        """Step time over that of `reference`: `mean`, `low` and `high`, NaN where not timed."""
        if run not in self.runs:
            return pd.Series(math.nan, index=["mean", "low", "high"])
        return step_ratios(list(self.runs.values()), reference).loc[run]

    def step_ms(self, run: str) -> float:
        """Mean over rounds; NaN where it was not timed."""
        return float(np.mean(self.runs[run].step_ms)) if run in self.runs else math.nan


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
        link = UNLIMITED if one.bits_per_second is None else one.link
        groups.setdefault((one.world_size, one.delay_ms), []).append(LinkTiming(link, rate, runs))
    found = [
        Crossover(*key, sorted(timings, key=lambda timing: timing.bits_per_second))
        for key, timings in sorted(groups.items())
    ]
    return [group for group in found if group.measured]


def references(group: Crossover) -> dict[str, str]:
    """For every run with a codec the run that it has to beat: the same strategy without.

    Preferred is one that exchanges: gloo's own reduce-scatter sends twice the bytes, and whoever
    beats that has not won by a codec. Runs without a counterpart are left out.
    """
    strategies = group.strategies()
    plain = sorted(
        (run for run, strategy in strategies.items() if _plain(strategy)),
        key=lambda run: strategies[run].gradients.route != "exchange",
    )
    found = {}
    for run, strategy in strategies.items():
        same = [other for other in plain if _apart(strategies[other]) == _apart(strategy)]
        if not _plain(strategy) and same:
            found[run] = same[0]
    return found


def _plain(strategy: Strategy) -> bool:
    weights = strategy.weights
    return strategy.gradients.plain() and (weights is None or weights.codec.name == "none")


def _apart(strategy: Strategy) -> dict[str, Any]:
    """From what travels how."""
    return strategy.model_dump(mode="json", exclude={"gradients", "weights"})


def crossing(curve: Sequence[tuple[float, float]]) -> float:
    """The rate at which a ratio of step times reaches 1, coming from lower rates.

    Args:
        curve: rates in bits per second, ascending, each with the ratio there.

    Returns:
        0 below all of them, infinity above.
    """
    if curve[-1][1] < 1:
        return math.inf
    for (rate, before), (next_rate, after) in reversed([*pairwise(curve)]):
        if before < 1:
            share = math.log(before) / (math.log(before) - math.log(after))
            return rate * (next_rate / rate) ** share
    return 0.0


def stops_paying(group: Crossover, run: str, reference: str) -> str:
    """The rate from which on a codec no longer shortens the step, with its interval, in words."""
    at = [(t.bits_per_second, t.ratio(run, reference)) for t in group.measured]
    known = [(rate, found) for rate, found in at if math.isfinite(found["mean"])]
    if not known:
        return ABSENT
    lowest, highest = known[0][0], known[-1][0]

    def told(key: str) -> str:
        rate = crossing([(rate, float(found[key])) for rate, found in known])
        if rate == 0:
            return f"below {rate_text(lowest)}"
        return f"above {rate_text(highest)}" if math.isinf(rate) else rate_text(rate)

    text = told("mean")
    if not all(math.isfinite(found["low"]) for _, found in known):
        return text
    # a ratio that is certainly below 1 gives the lowest rate
    ends = told("high"), told("low")
    return text if ends == (text, text) else f"{text} ({ends[0]} to {ends[1]})"


def rate_text(bits_per_second: float) -> str:
    """`1 Gbit/s`."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_second >= size:
            return f"{figure(bits_per_second / size).removesuffix('.00').removesuffix('.0')} {unit}"
    return f"{figure(bits_per_second / 1e3)} kbit/s"


def fastest(group: Crossover, baseline: str) -> str:
    """A sentence: the run with the shortest step on each link."""
    parts = []
    for timing in group.timings:
        steps = {run: timing.step_ms(run) for run in timing.runs if run != NO_COMMUNICATION}
        best = min(steps, key=steps.__getitem__)
        gain = 1 / timing.ratio(best, baseline)["mean"]
        other = best != baseline and math.isfinite(gain)
        than = f", {figure(gain)} times as fast as {baseline}" if other else ""
        parts.append(f"{timing.link}: {best} ({figure(steps[best])} ms{than})")
    return f"Shortest step on {group.title}, by link: {'; '.join(parts)}."


def step_table(group: Crossover, baseline: str) -> Table:
    """Step time of every run on every link, and its ratio to the baseline."""
    rows = [
        {"run": run, **_by_link(group, lambda timing, run=run: timing.ratio(run, baseline))}
        for run in group.runs
    ]
    columns = [RUN]
    for number, timing in enumerate(group.timings):
        columns += [
            Column(timing.link, "ms", _step(timing), ""),
            Column("over baseline", timing.link, ratio(f"link{number}", 3), ""),
        ]
    return run_table(f"Step time by link, {group.title}", columns, pd.DataFrame(rows), baseline)


def _by_link(group: Crossover, found: Callable[[LinkTiming], pd.Series]) -> dict[str, float]:
    """A mean with its interval for each link, as `timing_columns.ratio` reads it."""
    return {
        f"link{number}{end}": each[key]
        for number, each in enumerate(map(found, group.timings))
        for key, end in (("mean", ""), ("low", "_low"), ("high", "_high"))
    }


def _step(timing: LinkTiming) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        run = timing.runs.get(row["run"])
        if run is None:
            return ABSENT
        deviation = float(np.std(run.step_ms, ddof=1)) if len(run.step_ms) > 1 else math.nan
        return plus_minus(timing.step_ms(row["run"]), deviation)

    return cell


def codec_table(group: Crossover) -> Table:
    """How many times faster each codec makes a step on each link, and where that ends."""
    chosen = references(group)
    rows = [
        {
            "run": run,
            "reference": reference,
            "stop": stops_paying(group, run, reference),
            **_by_link(group, lambda timing, run=run: speed_up(timing.ratio(run, chosen[run]))),
        }
        for run, reference in chosen.items()
    ]
    columns = [
        RUN,
        Column("against", "", lambda row: str(row["reference"]), "", False),
        *(
            Column("speed-up", timing.link, ratio(f"link{number}"), "")
            for number, timing in enumerate(group.timings)
        ),
        Column("stops paying at", "", lambda row: str(row["stop"]), "", False),
    ]
    return run_table(f"Where codecs stop paying, {group.title}", columns, pd.DataFrame(rows), "")


def speed_up(ratios: pd.Series) -> pd.Series:
    """From a ratio of step times."""
    ends = {"mean": "mean", "low": "high", "high": "low"}
    return pd.Series({key: 1 / ratios[end] for key, end in ends.items()})
