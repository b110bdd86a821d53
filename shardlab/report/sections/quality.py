"""Time to quality: steps until a loss of the training runs, times the step time of a timing.

A link changes the time of a step and not its loss, and the training runs are minutes apart: their
own times would compare the drift of the machine.
"""

import math
from collections.abc import Mapping, Sequence

from shardlab.report.aggregate import mean_over_seeds
from shardlab.report.evidence import Evidence
from shardlab.report.quality import quality_at_time, steps_to_quality
from shardlab.report.tables import RUN, Column, Row, Section, Table, make_table, optional
from shardlab.report.timings import Crossover, LinkTiming

Curves = Mapping[str, list[list[float]]]
"""losses by run and seed"""


def time_to_quality(evidence: Evidence) -> Section | None:
    """Show time to each loss and loss at each time; None if the parameters ask for neither."""
    timings, curves = [evidence.steps], _curves(evidence, evidence.runs)
    columns = [
        *_times(timings, curves, evidence.quality.train_loss),
        *_losses(timings, curves, evidence.quality.time_s),
    ]
    if not columns:
        return None
    return Section(
        "Time to quality",
        sentences=[
            "Steps until the training loss, smoothed over a twentieth of the run, is reached; the "
            "same times the step time of the timing; and the smoothed loss of the last step that "
            "ended by a time. A loss that a seed does not reach has no time.",
        ],
        tables=[evidence.run_table("Time to quality", [RUN, *columns])],
    )


def quality_tables(group: Crossover, evidence: Evidence) -> list[Table]:
    """Return time to each loss and loss after each time that the parameters ask for, by link.

    Means over seeds; absent if a seed does not reach the loss.
    """
    curves = _curves(evidence, [run for run in group.runs if run in evidence.losses])
    titles = {
        "Time to a training loss": _times(group.timings, curves, evidence.quality.train_loss),
        "Training loss at equal time": _losses(group.timings, curves, evidence.quality.time_s),
    }
    rows: list[Row] = [{"run": run} for run in curves]
    return [
        make_table(f"{title}, {group.title}", [RUN, *columns], rows, evidence.baseline)
        for title, columns in titles.items()
        if curves and columns
    ]


def _curves(evidence: Evidence, runs: Sequence[str]) -> Curves:
    return {
        run: [[seed[step] for step in sorted(seed)] for seed in evidence.losses[run].values()]
        for run in runs
    }


def _times(timings: Sequence[LinkTiming], curves: Curves, wanted: Sequence[float]) -> list[Column]:
    columns = []
    for loss in wanted:
        title = f"loss {loss:g}"
        steps = {
            run: mean_over_seeds([steps_to_quality(seed, loss) for seed in seeds])
            for run, seeds in curves.items()
        }
        columns.append(_by_run(title, "steps", steps))
        for timing in timings:
            seconds = {run: count * timing.step_ms(run) / 1e3 for run, count in steps.items()}
            columns.append(_by_run(title, f"s, {timing.link}", seconds))
    return columns


def _losses(timings: Sequence[LinkTiming], curves: Curves, wanted: Sequence[float]) -> list[Column]:
    columns = []
    for seconds in wanted:
        for timing in timings:
            losses = {
                run: mean_over_seeds([_loss_after(s, timing.step_ms(run), seconds) for s in seeds])
                for run, seeds in curves.items()
            }
            columns.append(_by_run(f"after {seconds:g} s", timing.link, losses))
    return columns


def _by_run(title: str, unit: str, values: Mapping[str, float]) -> Column:
    """Return a column with a number for each run; NaN is a dash."""
    return Column(title, unit, lambda row: optional(values[row["run"]]), "")


def _loss_after(losses: list[float], step_ms: float, seconds: float) -> float | None:
    if math.isnan(step_ms):
        return None
    times = [(step + 1) * step_ms / 1e3 for step in range(len(losses))]
    return quality_at_time(losses, times, seconds)
