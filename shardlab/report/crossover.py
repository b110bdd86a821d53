"""What the rate of a link changes: which run is fastest, and where each codec stops paying.

A codec pays as long as a step is shorter than that of the same strategy without a codec. The rate
at which it stops is interpolated between two measured ones: logarithm of the ratio of step times
over logarithm of the rate.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from shardlab.report.cells import RUN, Column, Row
from shardlab.report.link_timings import Crossover, LinkTiming
from shardlab.report.numbers import ABSENT, figure, plus_minus, rate_text
from shardlab.report.tables import Table, run_table
from shardlab.report.timing_columns import ratio
from shardlab.strategy.strategy import Strategy


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


def fastest(group: Crossover, baseline: str) -> str:
    """A sentence: the run with the shortest step on each link."""
    parts = []
    for timing in group.timings:
        best = timing.fastest()
        gain = 1 / timing.ratio(best, baseline)["mean"]
        other = best != baseline and math.isfinite(gain)
        than = f", {figure(gain)} times as fast as {baseline}" if other else ""
        parts.append(f"{timing.link}: {best} ({figure(timing.step_ms(best))} ms{than})")
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
