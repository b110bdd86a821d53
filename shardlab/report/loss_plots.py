"""Plots of the time to one loss: gains by the link, and quality by the bytes of a step."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from shardlab.core.numbers import figure
from shardlab.report.loss_times import FAMILIES, ONE_DEVICE, Comparison, LinkTimes, Way
from shardlab.report.plots import BASELINE_COLOUR, COLOURS, MARKERS, STYLE, WIDTH, message
from shardlab.report.tuned import Tuned

_LEAST = 0.01
"""ratio that is shown of links on which synchronisation takes less"""


@mpl.rc_context(STYLE)
def gain_plot(compared: Sequence[Comparison]) -> Figure:
    """Plot the gain over one device by the ratio of synchronisation to computation."""
    gains = [(comparison.link, comparison.over_one_device()) for comparison in compared]
    if not any(of_link for _, of_link in gains):
        return message("Nothing was compared with one device.")
    drawing = Figure((WIDTH, 3.4), layout="constrained")
    axes = drawing.subplots()
    for number, family in enumerate(FAMILIES):
        points = [(_place(link), of[family]) for link, of in gains if family in of]
        x, y = [x for x, _ in points], [gain.ratio for _, gain in points]
        axes.plot(x, y, label=family, color=_colour(number), marker=MARKERS[number])
        for at, gain in points:
            axes.vlines(at, gain.low, gain.high, color=_colour(number), linewidth=1)
    axes.set(xscale="log", ylim=(0, None))
    ticks = [f"{figure(link.ratio, 2)}\n{link.name}" for link, _ in gains]
    axes.set_xticks([_place(link) for link, _ in gains], ticks, fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("synchronisation / computation")
    axes.set_ylabel("times as fast to the loss as one device")
    axes.legend()
    return drawing


@mpl.rc_context(STYLE)
def bytes_plot(ways: Sequence[Way], tuned: Tuned) -> Figure:
    """Plot the perplexity after equal tokens by the bytes that a rank sends for a micro-batch."""
    points: dict[str, dict[str, tuple[float, float]]] = {}
    for way in ways:
        curve = way.curve
        over = tuned.perplexity(curve)
        if over is not None:
            kb = curve.mean_bytes() / 1e3 / (curve.micro_batches // curve.ranks)
            name = f"{curve.name}/{curve.micro_batches}"  # of all its strategies
            points.setdefault(way.family, {})[name] = kb, over.ratio
    if not points:
        return message("No method was trained for the tokens of a run of train.")
    drawing = Figure((1.5 * WIDTH, 4.4), layout="constrained")
    axes = drawing.subplots()
    alone = [ratio for _, ratio in points.pop(ONE_DEVICE, {}).values()]
    if alone:
        label = f"{ONE_DEVICE}, the best"
        axes.axhline(min(alone), color=_colour(0), linestyle="--", label=label)
    for family, of_family in points.items():
        number = FAMILIES.index(family)
        ordered = sorted(of_family.items(), key=lambda item: item[1])
        sent, ratios = zip(*of_family.values(), strict=True)
        axes.scatter(sent, ratios, color=_colour(number), marker=MARKERS[number], label=family)
        for place, (name, point) in enumerate(ordered):
            offset = (4, (3, -9)[place % 2])
            axes.annotate(name, point, offset, textcoords="offset points", fontsize=7)
    axes.set(xscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("kB per micro-batch and rank, mean over the run")
    axes.set_ylabel("perplexity over that of the stock method")
    axes.legend()
    return drawing


def _place(link: LinkTimes) -> float:
    """Return the ratio of a link as a place on a logarithmic axis."""
    return max(link.ratio, _LEAST)


def _colour(number: int) -> str:
    """Return the colour of a kind of methods by its place; the first is the baseline."""
    return BASELINE_COLOUR if number == 0 else COLOURS[number - 1]
