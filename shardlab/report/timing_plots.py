"""The plots of the timings: what more ranks cost, and what the rate of a link changes."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardlab.records.timing import NO_COMMUNICATION
from shardlab.report.crossover import speed_up
from shardlab.report.link_timings import Crossover
from shardlab.report.numbers import figure as number
from shardlab.report.numbers import percent, rate_text
from shardlab.report.plots import STYLE, WIDTH, colours, dashes
from shardlab.report.scaling import unlinked

_BOUND: dict[str, Any] = {"color": "#000000", "linestyle": (0, (1, 2)), "linewidth": 1.3}


def draw_timings(
    timed: pd.DataFrame, groups: Sequence[Crossover], runs: list[str], baseline: str
) -> dict[str, Figure]:
    """Both plots by name; one that has nothing to show says so.

    Args:
        timed: `timings.timing_table`.
        runs: in the order of their colours in all plots; others follow.
    """
    everyone = [*dict.fromkeys([*runs, *timed["run"]])]
    everyone.remove(NO_COMMUNICATION)
    look: dict[str, dict[str, Any]] = {
        run: {"color": colour, "linestyle": dash, "linewidth": 1.3, "marker": "o", "markersize": 4}
        for (run, dash), colour in zip(
            dashes(everyone).items(),
            map(colours(everyone, baseline).get, everyone),
            strict=True,
        )
    }
    with mpl.rc_context(STYLE):
        return {
            "scaling": _scaling(unlinked(timed), look, baseline),
            "crossover": _crossover(groups, look, baseline),
        }


def _scaling(rows: pd.DataFrame, look: dict[str, dict[str, Any]], baseline: str) -> Figure:
    """Tokens per second by ranks; below, how much of backward is communication."""
    if rows.empty:
        return _nothing("No timing without an emulated link.")
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True)
    for run, found in rows.sort_values("world_size", kind="stable").groupby("run", sort=False):
        style = {**_BOUND, "marker": "x"} if run == NO_COMMUNICATION else look[run]
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
        return f"{baseline} was not timed"
    most = own.loc[own["world_size"].idxmax()]
    return (
        f"{most['world_size']} ranks: {percent(1 / most['bound_ratio'], 0)} of the speed\n"
        f"without communication ({baseline})"
    )


def _crossover(
    groups: Sequence[Crossover], look: dict[str, dict[str, Any]], baseline: str
) -> Figure:
    """Speed-up over the baseline by the rate of the link; a panel per number of ranks."""
    groups = [group for group in groups if baseline in _on_links(group)]
    if not groups:
        return _nothing(f"No timing of {baseline} on an emulated link.")
    figure = Figure(figsize=(WIDTH, 1.2 + 3.4 * len(groups)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        _speed_ups(axes, group, look, baseline)
        axes.set_ylabel(f"times as fast as {baseline}")
        axes.set_title(_slowest(group, baseline))
    panels[-1].set_xlabel("rate of the link")
    _legend(figure, *panels)
    return figure


def _on_links(group: Crossover) -> set[str]:
    return {run for timing in group.measured for run in timing.runs}


def _slowest(group: Crossover, baseline: str) -> str:
    """Where compression can gain most: what it does gain there."""
    timing = next(timing for timing in group.measured if baseline in timing.runs)
    best = timing.fastest()
    gain = speed_up(timing.ratio(best, baseline))["mean"]
    than = f"{number(gain)} times as fast as {baseline}" if best != baseline else "the baseline"
    return f"{group.title}, {timing.link}: {best}\nis fastest, {than}"


def _speed_ups(
    axes: Axes, group: Crossover, look: dict[str, dict[str, Any]], baseline: str
) -> None:
    for run in group.runs:
        style = _BOUND if run == NO_COMMUNICATION else look[run]
        gains = pd.DataFrame([speed_up(t.ratio(run, baseline)) for t in group.measured])
        if gains["mean"].isna().all():
            continue  # it was timed without an emulated link alone
        rates = [timing.bits_per_second for timing in group.measured]
        axes.plot(rates, gains["mean"], label=run, **style)
        if run != NO_COMMUNICATION and gains["low"].notna().all():
            axes.fill_between(rates, gains["low"], gains["high"], alpha=0.12, color=style["color"])
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    rates = sorted({timing.bits_per_second for timing in group.measured})
    axes.set_xticks(rates, [rate_text(rate) for rate in rates])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _legend(figure: Figure, *axes: Axes) -> None:
    """One for all panels."""
    found: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2)


def _nothing(text: str) -> Figure:
    figure = Figure(figsize=(WIDTH, 1.2), layout="constrained")
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure
