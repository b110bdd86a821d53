"""Plots of timings and of the forecast: scaling, speed-up by link rate, predicted throughput."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.forecast.extrapolation import Point
from shardlab.report.numbers import figure as number
from shardlab.report.numbers import percent, rate_text
from shardlab.report.plots import STYLE, line_styles, new_figure
from shardlab.report.timings import Crossover, speed_up

_ACROSS = 2
"""panels side by side"""
_TOP = 112
"""upper end of a panel, %"""


@mpl.rc_context(STYLE)
def scaling_plot(rows: pd.DataFrame, runs: Sequence[str], baseline: str) -> Figure:
    """Plot tokens per second by ranks; below, the fraction of backward with communication.

    Args:
        rows: of `timings.timing_table`, without an emulated link.
        runs: in the order of their colours in all plots; others follow.
    """
    if rows.empty:
        return _message("No timing without an emulated link.")
    styles = line_styles([*runs, *rows["run"]], baseline)
    figure = new_figure(5.4)
    top, below = figure.subplots(2, 1, sharex=True)
    for run, found in rows.sort_values("world_size", kind="stable").groupby("run", sort=False):
        marker = "x" if run == NO_COMMUNICATION else "o"
        style = {**styles[run], "marker": marker, "markersize": 4}
        top.plot(found["world_size"], found["tokens_per_s"], label=run, **style)
        if run != NO_COMMUNICATION:
            below.plot(found["world_size"], 100 * found["backward_comm_share"], **style)
    top.set_ylim(bottom=0)
    top.set_ylabel("tokens/s, all ranks")
    below.set_ylim(0, 100)
    below.set_ylabel("communication,\n% of backward")
    below.set_xlabel("ranks")
    sizes = sorted(set(rows["world_size"]))
    below.set_xticks(sizes, [str(size) for size in sizes])
    top.set_title(_most_ranks(rows, baseline))
    _legend(figure, top)
    return figure


def _most_ranks(rows: pd.DataFrame, baseline: str) -> str:
    own = rows[rows["run"] == baseline]
    if own.empty:
        return f"{baseline} is not timed"
    most = own.loc[own["world_size"].idxmax()]
    return (
        f"{most['world_size']} ranks: {percent(1 / most['bound_ratio'], 0)} of the\n"
        f"no-communication bound ({baseline})"
    )


@mpl.rc_context(STYLE)
def crossover_plot(
    groups: Sequence[Crossover], timed: Sequence[str], runs: Sequence[str], baseline: str
) -> Figure:
    """Plot the speed-up over the baseline by link rate, a panel per number of ranks.

    Args:
        timed: names of timed runs, which may include others than `runs`.
        runs: in the order of their colours in all plots; others follow.
    """
    styles = line_styles([*runs, *timed], baseline)
    groups = [group for group in groups if any(baseline in t.runs for t in group.measured)]
    if not groups:
        return _message(f"No timing of {baseline} on an emulated link.")
    figure = new_figure(1.2 + 3.4 * len(groups))
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        _speed_ups(axes, group, styles, baseline)
        axes.set_ylabel(f"times as fast as {baseline}")
        axes.set_title(_slowest(group, baseline))
    panels[-1].set_xlabel("link rate")
    _legend(figure, *panels)
    return figure


def _slowest(group: Crossover, baseline: str) -> str:
    """Return the speed-up on the slowest link, on which compression can gain most."""
    timing = next(timing for timing in group.measured if baseline in timing.runs)
    best = timing.fastest()
    gain = speed_up(timing.ratio(best, baseline))["mean"]
    than = f"{number(gain)} times as fast as {baseline}" if best != baseline else "the baseline"
    return f"{group.title}, {timing.link}: {best}\nis fastest, {than}"


def _speed_ups(
    axes: Axes, group: Crossover, styles: dict[str, dict[str, Any]], baseline: str
) -> None:
    for run in group.runs:
        gains = pd.DataFrame([speed_up(t.ratio(run, baseline)) for t in group.measured])
        if gains["mean"].isna().all():
            continue  # timed without an emulated link alone
        rates = [timing.bits_per_second for timing in group.measured]
        marker = "" if run == NO_COMMUNICATION else "o"
        axes.plot(rates, gains["mean"], label=run, marker=marker, markersize=4, **styles[run])
        if run != NO_COMMUNICATION and gains["low"].notna().all():
            colour = styles[run]["color"]
            axes.fill_between(rates, gains["low"], gains["high"], alpha=0.12, color=colour)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    rates = sorted({timing.bits_per_second for timing in group.measured})
    axes.set_xticks(rates, [rate_text(rate) for rate in rates])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _legend(figure: Figure, *axes: Axes) -> None:
    """Draw one legend for all panels."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2)


def _message(text: str) -> Figure:
    figure = new_figure(1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure


@mpl.rc_context(STYLE)
def forecast_plot(points: Sequence[Point], runs: Sequence[str], baseline: str) -> Figure:
    """Plot predicted throughput by ranks, a panel per cluster, with the 95 % interval of the fits.

    Args:
        runs: in the order of their colours in all plots; others follow.
    """
    styles = line_styles([*runs, *(point.run for point in points)], baseline)
    links = [*dict.fromkeys(point.link for point in points)]
    sizes = sorted({point.ranks for point in points})
    down = -(-len(links) // _ACROSS)
    figure = new_figure(1.2 + 1.7 * down)
    panels = figure.subplots(down, _ACROSS, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, link in zip(panels, links, strict=False):
        for run in dict.fromkeys(point.run for point in points):
            _line(axes, [p for p in points if (p.run, p.link) == (run, link)], styles[run])
        axes.set_title(link, fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7, rotation=45)
        axes.set_ylim(0, _TOP)
    for spare in panels[len(links) :]:
        spare.set_visible(False)
    for axes in panels[: len(links)][-_ACROSS:]:
        axes.set_xlabel("ranks")
    figure.supylabel("% of a rank without communication", fontsize=9)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _line(axes: Axes, points: Sequence[Point], style: dict[str, Any]) -> None:
    ranks = [point.ranks for point in points]
    axes.plot(ranks, [100 * p.efficiency for p in points], label=points[0].run, **style)
    worst = [100 * point.compute_ms / point.high_ms for point in points]
    # an interval of few observations may begin at 0 ms
    best = [100 * p.compute_ms / max(p.low_ms, 100 * p.compute_ms / _TOP) for p in points]
    axes.fill_between(ranks, worst, best, color=style["color"], alpha=0.12, linewidth=0)
