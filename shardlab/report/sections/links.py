"""Sections on links: steps by link, break-even rates of codecs, time to quality.

A codec pays while the step is shorter than that of the same strategy without a codec. The rate at
which it stops to pay is interpolated between two measured rates: logarithm of the ratio of step
times over logarithm of the rate.

Time to quality is the number of steps until a loss of the training runs times the step time of a
timing. A link changes the time of a step and not its loss, and the training runs are minutes apart:
their own times would compare the drift of the machine.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import pandas as pd

from shardlab.core.numbers import ABSENT, figure, number
from shardlab.report.columns import MICRO_BATCHES, TIMED, in_timing
from shardlab.report.evidence import Evidence
from shardlab.report.plots import crossover_plot
from shardlab.report.quality import has_warmup, quality_after, steps_to_quality
from shardlab.report.tables import RUN, Column, Figure, Row, Section, Table, make_table, speed_up
from shardlab.report.timings import group_title, link_headings


def crossover(evidence: Evidence) -> Figure:
    """Return the plot of steps by link rate, which stands beside the verdict."""
    return Figure(
        "crossover",
        "Step at equal tokens by link rate. One device alone: as many of its steps as there are "
        "ranks. A click on a name hides its line.",
        crossover_plot(
            evidence.crossovers, evidence.timing_rows["run"], evidence.runs, evidence.baseline
        ),
    )


def links(evidence: Evidence) -> Section | None:
    """Show the rates at which codecs stop paying; None where no codec was timed on links."""
    tables = [table for table in map(codec_table, evidence.crossovers) if table.rows]
    sentence = (
        "A codec pays while a step is shorter than that of the same strategy without a codec. The "
        "rate at which it stops paying is interpolated between measured rates on logarithmic "
        "scales; its interval is that of the ratios of step times."
    )
    return Section("Which codec for which link?", [sentence], tables=tables) if tables else None


def all_timings(evidence: Evidence) -> Section:
    """Show every timed run; the other sections show those with the micro-batches of training."""
    rows = evidence.all_timing_rows
    parts = [MICRO_BATCHES] if rows["accumulation"].nunique() > 1 else []
    table = evidence.timing_table("All timings", [*TIMED[:3], *parts, *TIMED[3:]], rows)
    return Section(table.title, tables=[table], folded=True)


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
            Column("speed-up", link, in_timing(group, timing, speed_up("codec_ratio")))
            for timing, link in link_headings(group).items()
        ),
        Column("stops paying at", "", "stop", numeric=False),
    ]
    return make_table(f"Where codecs stop paying, {group_title(group)}", columns, rows)


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
            return f"below {number(rates[0], 'bit/s')}"
        return f"above {number(rates[-1], 'bit/s')}" if math.isinf(rate) else number(rate, "bit/s")

    text = text_of("codec_ratio")
    if rows["codec_ratio_low"].isna().any():
        return text
    # the upper end of the ratio gives the lower end of the rate
    ends = text_of("codec_ratio_high"), text_of("codec_ratio_low")
    return text if ends == (text, text) else f"{text} ({ends[0]} to {ends[1]})"


_LOSSES = {"train_loss": "training", "val_loss": "validation"}
"""in words, by the name of a curve"""


def time_to_quality(evidence: Evidence) -> Section | None:
    """Show time to each loss and loss at each time on every link; None if nobody asks for them.

    Means over seeds; absent if a seed does not reach the loss. Runs with a warm-up are left out:
    the timings are of the steps after it.
    """
    rows, quality = evidence.timing_rows, evidence.quality
    # losses of the training runs hold for their number of ranks alone
    rows = rows[rows["world_size"] == evidence.records[0].world_size]
    warmed = {record.run for record in evidence.records if has_warmup(record)}
    rows = rows[rows["run"].isin(evidence.losses) & ~rows["run"].isin(warmed)]
    runs = [{"run": run} for run in rows["run"].unique()]
    tables = []
    for name, curves in evidence.curves.items():
        reached, after = _loss_columns(rows, curves, getattr(quality, name), quality.time_s)
        kind = _LOSSES[name]
        titles = {
            f"Time to a {kind} loss": reached,
            f"{kind.capitalize()} loss at equal time": after,
        }
        tables += [
            make_table(title, [RUN, *columns], runs, evidence.baseline)
            for title, columns in titles.items()
            if columns
        ]
    sentence = (
        "Steps until the training loss, smoothed over a twentieth of the run, is reached; the "
        "same times the step time of each timing; and the smoothed loss of the last step that "
        "ended by a time. Validation losses are interpolated between evaluations. A loss that a "
        "seed does not reach has no time, and a run that is over keeps its last loss. Each seed by "
        "its own steps: quality.jsonl."
    )
    shown, folded = tables[:1], [Section(t.title, tables=[t], folded=True) for t in tables[1:]]
    return Section("Time to quality", [sentence], tables=shown, sections=folded) if tables else None


def _loss_columns(
    rows: pd.DataFrame,
    curves: Mapping[str, Mapping[int, pd.Series]],
    losses: Sequence[float],
    moments: Sequence[float],
) -> tuple[list[Column], list[Column]]:
    """Return the columns of steps and time to each loss, and of the loss at each moment.

    Args:
        rows: of timings.
        curves: by run and seed.
    """
    runs, links = rows["run"].unique(), link_headings(rows)
    steps_s = rows.pivot(index="run", columns="timing", values="step_ms") / 1e3

    def mean(run: str, measure: Callable[[pd.Series], float | None]) -> float:
        """Return the mean over seeds; NaN if one has no value."""
        values = [measure(curve) for curve in curves.get(run, {}).values()]
        return float(pd.Series(values, dtype=float).mean(skipna=False))

    reached, after = [], []
    for loss in losses:
        steps = pd.Series(
            {run: mean(run, partial(steps_to_quality, threshold=loss)) for run in runs}
        )
        reached.append(_by_run(f"loss {loss:g}", "steps", steps))
        for timing, link in links.items():
            reached.append(_by_run(f"loss {loss:g}", f"s, {link}", steps * steps_s[timing]))
    for moment in moments:
        for timing, link in links.items():
            ended = moment / steps_s[timing].dropna()
            at = {run: mean(run, partial(quality_after, steps=n)) for run, n in ended.items()}
            after.append(_by_run(f"after {moment:g} s", link, pd.Series(at, dtype=float)))
    return reached, after


def _by_run(title: str, unit: str, values: pd.Series) -> Column:
    """Return a column with a number for each run; a dash where there is none."""
    return Column(title, unit, lambda row: figure(values.get(row["run"], math.nan)))
