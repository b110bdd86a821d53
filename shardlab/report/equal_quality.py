"""How soon each run would be how good on each link.

A link changes how long a step takes, not what is learned in it: losses are those of the matrix,
times those of the timings.
"""

import math
import statistics

import pandas as pd

from shardlab.experiment.schema import Quality
from shardlab.report.cells import RUN, Column, where_known
from shardlab.report.link_timings import Crossover
from shardlab.report.tables import Table, run_table
from shardlab.statistics.quality import quality_at_time, steps_to_quality

Losses = dict[str, dict[int, dict[int, float]]]
"""run -> seed -> step -> training loss"""


def quality_tables(
    group: Crossover, losses: Losses, quality: Quality, baseline: str
) -> list[Table]:
    """Time to each loss, and the loss after each time, as far as the parameters ask for any.

    Means over seeds; a run that missed a loss with one of them has no time to it.
    """
    curves = {
        run: [[seed[step] for step in sorted(seed)] for seed in losses[run].values()]
        for run in group.runs
        if run in losses
    }
    titles = {
        f"Time to a training loss, {group.title}": _times(group, curves, quality.train_loss),
        f"Training loss at equal time, {group.title}": _losses(group, curves, quality.time_s),
    }
    return [
        run_table(title, [RUN, *columns], pd.DataFrame({"run": [*curves], **cells}), baseline)
        for title, (columns, cells) in titles.items()
        if curves and columns
    ]


Curves = dict[str, list[list[float]]]
Cells = tuple[list[Column], dict[str, list[float]]]


def _times(group: Crossover, curves: Curves, wanted: tuple[float, ...]) -> Cells:
    columns, cells = [], {}
    for loss in wanted:
        steps = [_mean([steps_to_quality(each, loss) for each in curves[run]]) for run in curves]
        key = f"{loss:g}"
        cells[key] = steps
        columns.append(Column(f"loss {loss:g}", "steps", where_known(key), ""))
        for timing in group.timings:
            key = f"{loss:g} {timing.link}"
            cells[key] = [
                count * timing.step_ms(run) / 1e3 for run, count in zip(curves, steps, strict=True)
            ]
            columns.append(Column(f"loss {loss:g}", f"s, {timing.link}", where_known(key), ""))
    return columns, cells


def _losses(group: Crossover, curves: Curves, wanted: tuple[float, ...]) -> Cells:
    columns, cells = [], {}
    for seconds in wanted:
        for timing in group.timings:
            key = f"{seconds:g} {timing.link}"
            cells[key] = [
                _mean([_loss_after(each, timing.step_ms(run), seconds) for each in curves[run]])
                for run in curves
            ]
            columns.append(Column(f"after {seconds:g} s", timing.link, where_known(key), ""))
    return columns, cells


def _loss_after(losses: list[float], step_ms: float, seconds: float) -> float | None:
    if math.isnan(step_ms):
        return None
    times = [(step + 1) * step_ms / 1e3 for step in range(len(losses))]
    return quality_at_time(losses, times, seconds)


def _mean(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else math.nan
