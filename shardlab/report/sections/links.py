"""Sections on links: the fastest run at each rate, break-even rates of codecs, time to quality.

A codec pays while the step is shorter than that of the same strategy without a codec. The rate at
which it stops to pay is interpolated between two measured rates: logarithm of the ratio of step
times over logarithm of the rate.

Time to quality is the number of steps until a loss of the training runs times the step time of a
timing. A link changes the time of a step and not its loss, and the training runs are minutes apart:
their own times would compare the drift of the machine.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd

from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.report.columns import TIMED, step_ms
from shardlab.report.evidence import Evidence
from shardlab.report.plots import crossover_plot
from shardlab.report.quality import quality_at_time, steps_to_quality
from shardlab.report.tables import (
    ABSENT,
    RUN,
    Cell,
    Column,
    Figure,
    Row,
    Section,
    Table,
    estimate,
    figure,
    interval,
    make_table,
    rate_text,
    within,
)
from shardlab.report.timings import group_title, link_headings


def links(evidence: Evidence) -> Section:
    """Show speed-ups by link rate, and break-even rates of codecs."""
    baseline = evidence.baseline
    everything = evidence.timing_table("All timings", TIMED, evidence.timing_rows)
    return Section(
        "Which codec for which link?",
        sentences=[
            "A codec pays while a step is shorter than that of the same strategy without a codec. "
            "The rate at which it stops paying is interpolated between measured rates on "
            "logarithmic scales; its interval is that of the ratios of step times.",
        ],
        figures=[
            Figure(
                "crossover",
                "Speed-up over the baseline at the same link rate, with its 95 % confidence "
                "interval over repetitions. The dotted line is the no-communication bound.",
                crossover_plot(
                    evidence.crossovers, evidence.timing_rows["run"], evidence.runs, baseline
                ),
            )
        ],
        sections=[
            Section(
                title=f"Links of {group_title(group)}",
                sentences=[fastest(group, baseline)],
                tables=[
                    table
                    for table in (step_table(group, baseline), codec_table(group))
                    if table.rows
                ],
            )
            for group in evidence.crossovers
        ],
        details=[Section(everything.title, tables=[everything])],
    )


def fastest(group: pd.DataFrame, baseline: str) -> str:
    """Return a sentence that names the run with the shortest step on each link."""
    parts = []
    for timing, link in link_headings(group).items():
        rows = group[(group["timing"] == timing) & (group["run"] != NO_COMMUNICATION)]
        best = rows.loc[rows["step_ms"].idxmin()]
        gain = 1 / best["step_ratio"]
        other = best["run"] != baseline and math.isfinite(gain)
        than = f", {figure(gain)} times as fast as {baseline}" if other else ""
        parts.append(f"{link}: {best['run']} ({figure(best['step_ms'])} ms{than})")
    return f"Shortest step on {group_title(group)}, by link: {'; '.join(parts)}."


def step_table(group: pd.DataFrame, baseline: str) -> Table:
    """Return the step time of every run on every link, and its ratio to the baseline."""
    columns = [RUN]
    for timing, link in link_headings(group).items():
        columns += [
            Column(link, "ms", _in_timing(group, timing, step_ms)),
            Column("/ baseline", link, _in_timing(group, timing, interval("step_ratio", 3))),
        ]
    rows = [{"run": run} for run in group["run"].unique()]
    return make_table(f"Step time by link, {group_title(group)}", columns, rows, baseline)


def codec_table(group: pd.DataFrame) -> Table:
    """Return the speed-up of each codec on each link, and its break-even rate."""
    rows: list[Row] = [
        {"run": run, "reference": reference, "stop": stops_paying(group, run)}
        for run, reference in group[["run", "reference"]].drop_duplicates("run").to_numpy()
        if reference
    ]
    columns = [
        RUN,
        Column("relative to", "", "reference", numeric=False),
        *(
            Column("speed-up", link, _in_timing(group, timing, _codec_speed_up))
            for timing, link in link_headings(group).items()
        ),
        Column("stops paying at", "", "stop", numeric=False),
    ]
    return make_table(f"Where codecs stop paying, {group_title(group)}", columns, rows)


def _in_timing(group: pd.DataFrame, timing: str, cell: Cell) -> Cell:
    """Show what a run has in one timing; a dash where it was not timed."""
    rows = {row["run"]: row for row in group[group["timing"] == timing].to_dict("records")}
    return lambda row: cell(rows[row["run"]]) if row["run"] in rows else ABSENT


def _codec_speed_up(row: Row) -> str:
    mean, high, low = (1 / ratio for ratio in estimate(row, "codec_ratio"))
    return within(mean, low, high, places=2)


def crossing(rates: Sequence[float], ratios: Sequence[float]) -> float:
    """Return the rate at which a ratio of step times reaches 1, from lower rates.

    Args:
        rates: bits per second, ascending.
        ratios: those there.

    Returns:
        0 below all rates, infinity above.
    """
    if ratios[-1] < 1:
        return math.inf
    curve = pairwise(zip(rates, ratios, strict=True))
    for (rate, before), (next_rate, after) in reversed([*curve]):
        if before < 1:
            fraction = math.log(before) / (math.log(before) - math.log(after))
            return float(rate * (next_rate / rate) ** fraction)
    return 0.0


def stops_paying(group: pd.DataFrame, run: str) -> str:
    """Return the break-even rate of a codec with its interval, as text."""
    rows = group[group["run"] == run].dropna(subset=["bits_per_second", "codec_ratio"])
    if rows.empty:
        return ABSENT
    rates = rows["bits_per_second"].tolist()

    def text_of(column: str) -> str:
        rate = crossing(rates, rows[column].tolist())
        if rate == 0:
            return f"below {rate_text(rates[0])}"
        return f"above {rate_text(rates[-1])}" if math.isinf(rate) else rate_text(rate)

    text = text_of("codec_ratio")
    if rows["codec_ratio_low"].isna().any():
        return text
    # the upper end of the ratio gives the lower end of the rate
    ends = text_of("codec_ratio_high"), text_of("codec_ratio_low")
    return text if ends == (text, text) else f"{text} ({ends[0]} to {ends[1]})"


def time_to_quality(evidence: Evidence) -> Section | None:
    """Show time to each loss and loss at each time on every link; None if nobody asks for them.

    Means over seeds; absent if a seed does not reach the loss. Runs that exchange rarely after a
    warm-up are left out: the timings are of the steps after it.
    """
    rows, quality = evidence.timing_rows, evidence.quality
    # losses of the training runs hold for their number of ranks alone
    rows = rows[rows["world_size"] == evidence.records[0].world_size]
    rows = rows[rows["run"].isin(evidence.losses)]
    warmed = {
        each.run
        for each in evidence.records
        if (each.strategy.get("sync") or {}).get("warmup_steps")
    }
    rows = rows[~rows["run"].isin(warmed)]
    runs = rows["run"].unique()
    links = link_headings(rows)
    steps_s = rows.pivot(index="run", columns="timing", values="step_ms") / 1e3

    def mean(run: str, measure: Callable[[pd.Series], float | None]) -> float:
        """Return the mean over seeds; NaN if one has no value."""
        values = [measure(seed) for seed in evidence.losses[run].values()]
        return float(pd.Series(values, dtype=float).mean(skipna=False))

    def loss_after(moment: float, run: str, step_s: float) -> float:
        return mean(
            run, lambda seed: quality_at_time(seed, step_s * np.arange(1, len(seed) + 1), moment)
        )

    reached, after = [], []
    for loss in quality.train_loss:
        steps = pd.Series(
            {run: mean(run, partial(steps_to_quality, threshold=loss)) for run in runs}
        )
        reached.append(_by_run(f"loss {loss:g}", "steps", steps))
        for timing, link in links.items():
            reached.append(_by_run(f"loss {loss:g}", f"s, {link}", steps * steps_s[timing]))
    for moment in quality.time_s:
        for timing, link in links.items():
            step_s = steps_s[timing].dropna()
            losses = {run: loss_after(moment, run, step) for run, step in step_s.items()}
            after.append(_by_run(f"after {moment:g} s", link, pd.Series(losses, dtype=float)))
    titles = {"Time to a training loss": reached, "Training loss at equal time": after}
    tables = [
        make_table(title, [RUN, *columns], [{"run": run} for run in runs], evidence.baseline)
        for title, columns in titles.items()
        if columns
    ]
    sentence = (
        "Steps until the training loss, smoothed over a twentieth of the run, is reached; the "
        "same times the step time of each timing; and the smoothed loss of the last step that "
        "ended by a time. A loss that a seed does not reach has no time, and a run that is over "
        "keeps its last loss."
    )
    return Section("Time to quality", [sentence], tables=tables) if tables else None


def _by_run(title: str, unit: str, values: pd.Series) -> Column:
    """Return a column with a number for each run; a dash where there is none."""
    return Column(title, unit, lambda row: figure(values.get(row["run"], math.nan)))
