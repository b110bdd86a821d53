"""The plot of the forecast: what is left of a rank's speed on clusters of thousands of ranks."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from shardlab.forecast.extrapolation import Point
from shardlab.report.plots import STYLE, WIDTH, colours, dashes

_ACROSS = 2
"""panels side by side"""


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
    down = -(-len(links) // _ACROSS)
    figure = Figure(figsize=(WIDTH, 1.2 + 1.7 * down), layout="constrained")
    panels = figure.subplots(down, _ACROSS, sharex=True, sharey=True, squeeze=False).flat
    for axes, link in zip(panels, links, strict=False):
        for run in dict.fromkeys(point.run for point in points):
            mine = [point for point in points if (point.run, point.link) == (run, link)]
            ranks = [point.ranks for point in mine]
            style = {"color": colour[run], "linestyle": dash[run]}
            axes.plot(ranks, [100 * p.efficiency for p in mine], label=run, linewidth=1.2, **style)
            band = (
                [100 * p.compute_ms / p.high_ms for p in mine],
                [100 * p.compute_ms / p.low_ms for p in mine],
            )
            axes.fill_between(ranks, *band, color=colour[run], alpha=0.12, linewidth=0)
        axes.set_title(link, fontsize=9)
        axes.set_xscale("log", base=2)
        sizes = sorted({point.ranks for point in points})
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7, rotation=45)
        axes.set_ylim(bottom=0)
    for spare in [*panels]:
        spare.set_visible(False)
    figure.supxlabel("ranks", fontsize=9)
    figure.supylabel("% of a rank without communication", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure
