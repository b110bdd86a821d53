"""The plot of the forecast: what is left of a rank's speed on clusters of thousands of ranks."""

from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardlab.forecast.extrapolation import Point
from shardlab.report.plots import STYLE, WIDTH, colours, dashes

_ACROSS = 2
"""panels side by side"""
_TOP = 112
"""% that a panel shows"""


def draw_forecast(points: Sequence[Point], runs: list[str], baseline: str) -> dict[str, Figure]:
    """Efficiency by ranks, a panel per cluster, with the 95 % interval of the fits.

    Args:
        runs: in the order of their colours in all plots; others follow.
    """
    with mpl.rc_context(STYLE):
        return {"forecast": _efficiency(points, runs, baseline)}


def _efficiency(points: Sequence[Point], runs: list[str], baseline: str) -> Figure:
    everyone = [*dict.fromkeys([*runs, *(point.run for point in points)])]
    colour, dash = colours(everyone, baseline), dashes(everyone)
    links = [*dict.fromkeys(point.link for point in points)]
    sizes = sorted({point.ranks for point in points})
    down = -(-len(links) // _ACROSS)
    figure = Figure(figsize=(WIDTH, 1.2 + 1.7 * down), layout="constrained")
    panels = figure.subplots(down, _ACROSS, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, link in zip(panels, links, strict=False):
        for run in dict.fromkeys(point.run for point in points):
            style = {"color": colour[run], "linestyle": dash[run], "linewidth": 1.2}
            _line(axes, [p for p in points if (p.run, p.link) == (run, link)], style)
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
    # an interval of little evidence begins at no time at all
    best = [100 * p.compute_ms / max(p.low_ms, 100 * p.compute_ms / _TOP) for p in points]
    axes.fill_between(ranks, worst, best, color=style["color"], alpha=0.12, linewidth=0)
