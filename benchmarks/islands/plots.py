"""Plots of the comparison: gains by the link, and quality by the bytes of a step."""

from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.islands.curves import Curve, LinkTimes, Row
from benchmarks.islands.families import FAMILIES, ONE_DEVICE, Comparison
from benchmarks.islands.methods import METHODS, TARGET
from shardlab.core.numbers import figure
from shardlab.report import plots
from shardlab.results.interval import Ratio

_NAMED_AT = {
    **dict.fromkeys(("diloco32-warm", "streaming32-warm"), (4, -9)),
    **dict.fromkeys(("ddp-topk-dense-first", "manual-int8-w8"), (4, -9)),
    **dict.fromkeys(("diloco32", "diloco128-warm"), (-4, -9)),
    **dict.fromkeys(("diloco32-int8", "stock"), (-4, 3)),
    "ddp-int4-acc4": (5, -3),
}
"""where names begin, points from those of the methods; to the left of them they end there"""


def gains_over_one_device(
    rows: Sequence[Row], links: Sequence[LinkTimes]
) -> dict[str, list[tuple[LinkTimes, Ratio]]]:
    """Return how many times as fast the best of each kind reaches the loss as one device does, the
    best on each link."""
    gains: dict[str, list[tuple[LinkTimes, Ratio]]] = {}
    compared = [(link, Comparison(rows, link)) for link in links]
    for family, names in FAMILIES.items():
        for link, comparison in compared:
            row, alone = comparison.first(names), comparison.first(FAMILIES[ONE_DEVICE])
            if row is not None and alone is not None:
                gains.setdefault(family, []).append((link, link.gain(row, alone)))
    return gains


@mpl.rc_context(plots.STYLE)
def gain_plot(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Figure:
    """Plot the gain over one device by the ratio of synchronisation to computation."""
    ordered = sorted(links, key=lambda link: link.ratio)
    drawing = Figure((plots.WIDTH, 3.4), layout="constrained")
    axes = drawing.subplots()
    for number, (family, gains) in enumerate(gains_over_one_device(rows, ordered).items()):
        x, y = [link.ratio for link, _ in gains], [gain.ratio for _, gain in gains]
        axes.plot(x, y, label=family, color=_colour(number), marker=plots.MARKERS[number])
        for (_, gain), at in zip(gains, x, strict=True):
            axes.vlines(at, gain.low, gain.high, color=_colour(number), linewidth=1)
    axes.set(xscale="log", ylim=(0, None))
    ticks = [f"{figure(link.ratio, 2)}\n{link.name}" for link in ordered]
    axes.set_xticks([link.ratio for link in ordered], ticks, fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("synchronisation / computation")
    axes.set_ylabel("times as fast to the loss as one device")
    axes.legend()
    return drawing


@mpl.rc_context(plots.STYLE)
def bytes_plot(curves: Mapping[str, Curve]) -> Figure:
    """Plot the perplexity after equal tokens by the bytes that a rank sends for a micro-batch."""
    drawing = Figure((1.5 * plots.WIDTH, 4.4), layout="constrained")
    axes = drawing.subplots()
    for number, (family, names) in enumerate(FAMILIES.items()):
        points = {}
        for name in names:
            over = curves[name].perplexity_over(curves[TARGET]) if name in curves else None
            if over is not None and METHODS[name].world_size <= 2:
                points[name] = over.ratio
        if not points:
            continue
        if family == ONE_DEVICE:
            best = min(points.values())
            axes.axhline(best, color=_colour(number), linestyle="--", label=f"{family}, the best")
            continue
        x = [curves[name].mean_bytes() / 1e3 / METHODS[name].accumulation for name in points]
        axes.scatter(
            x, [*points.values()], color=_colour(number), marker=plots.MARKERS[number], label=family
        )
        for at, (name, ratio) in zip(x, points.items(), strict=True):
            right, up = _NAMED_AT.get(name, (4, 3))
            axes.annotate(
                name,
                (at, ratio),
                (right, up),
                textcoords="offset points",
                ha="left" if right > 0 else "right",
                fontsize=7,
            )
    axes.set(xscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("kB per micro-batch and rank, mean over the run")
    axes.set_ylabel("perplexity over that of stock torch, equal tokens")
    axes.legend()
    return drawing


def _colour(number: int) -> str:
    """Return the colour of a kind of methods by its place; the first is the baseline."""
    return plots.BASELINE_COLOUR if number == 0 else plots.COLOURS[number - 1]
