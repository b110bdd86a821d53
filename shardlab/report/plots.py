"""Plots, and their style: a run has the same colour in each of them.

Figures are drawn without a display. Equal data give equal files: identifiers inside an SVG come
from a fixed salt and no date or version is written.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardlab.core.link import LOOPBACK
from shardlab.core.numbers import number, percent
from shardlab.predict.extrapolation import Point
from shardlab.report.tables import ONE_DEVICE
from shardlab.report.timings import group_title
from shardlab.results.timing_result import NO_COMMUNICATION

BASELINE_COLOUR = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5195", "#767676")
"""Okabe and Ito's colours, distinct under any colour vision; violet and grey replace yellow, which
is hard to see on white"""
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FILLS = ("full", "none", "left", "bottom")
"""fill styles of markers, as `DASHES` are those of lines"""
LOG_SCALE_FROM = 4.0
"""ratio of the largest to the smallest point from which an axis is logarithmic"""

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shardlab",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
}
_LONG = 16
"""characters of a name from which on three do not fit beside each other"""
WIDTH = 4.7
"""inches: narrow, so that the text stays readable when a phone scales the figure to its width"""
_ACROSS = 2
"""panels of the forecast side by side"""
_TOP = 112
"""upper end of its panels, %"""


def save(figure: Figure, path: Path, kind: str = "svg") -> None:
    """Write a figure as svg or png; equal figures give equal bytes."""
    unstamped = ("Date", "Creator", "Format", "Type") if kind == "svg" else ("Software",)
    with mpl.rc_context(STYLE):
        figure.savefig(path, format=kind, dpi=160, metadata=dict.fromkeys(unstamped))


def line_styles(runs: Iterable[str], baseline: str) -> dict[str, dict[str, Any]]:
    """Return colour, dashes and width of each run; one device alone is thick, the no-communication
    bound dotted.

    The baseline is black; the others take the palette in their order, with another dash pattern
    each time that the palette begins again.
    """
    apart = {ONE_DEVICE: (0, (5, 2)), NO_COMMUNICATION: (0, (1, 2))}
    runs = [*dict.fromkeys(run for run in runs if run not in apart)]
    others = [run for run in runs if run != baseline]
    colours = {run: COLOURS[i % len(COLOURS)] for i, run in enumerate(others)}
    dashes: dict[str, Any] = {
        run: DASHES[i // len(COLOURS) % len(DASHES)] for i, run in enumerate(runs)
    }
    return {
        run: {
            "color": colours.get(run, BASELINE_COLOUR),
            "linestyle": dash,
            "linewidth": 2.6 if run == ONE_DEVICE else 1.3,
        }
        for run, dash in {**dashes, **apart}.items()
    }


def _figure(height: float) -> Figure:
    """Return an empty figure of the common width; the height is in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


def message(text: str) -> Figure:
    """Return a figure that says why nothing is plotted."""
    figure = _figure(1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center")
    return figure


def _bars(count: int) -> tuple[Figure, Axes]:
    """Return a figure that fits so many horizontal bars."""
    figure = _figure(1.8 + 0.31 * max(count, 3))
    axes = figure.subplots()
    axes.grid(axis="y", visible=False)
    return figure, axes


def _legend(figure: Figure, *panels: Axes) -> None:
    """Draw one legend for all panels; the page hides a run where its name is clicked."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = 3 if max(map(len, handles), default=0) <= _LONG else 2
    rows = -(-len(handles) // columns)
    figure.set_figheight(figure.get_figheight() + 0.18 * max(0, rows - 4))
    legend = figure.legend(
        [*handles.values()], [*handles], loc="outside lower center", ncols=columns
    )
    for text in legend.get_texts():
        text.set_gid(f"legend:{text.get_text()}")


@mpl.rc_context(STYLE)
def loss_plot(
    losses: pd.DataFrame, runs: Sequence[str], baseline: str, kind: str = "training"
) -> Figure:
    """Plot mean losses of a kind with their band over seeds; below, minus that of the baseline.

    Args:
        losses: `aggregate.loss_curves`.
    """
    figure = _figure(5.2)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = line_styles(runs, baseline)
    curves = {run: losses[losses["run"] == run].set_index("step") for run in runs}
    smooth = max(1, len(curves[baseline]) // 20)
    for run, curve in curves.items():
        loss, sd = curve["loss"], curve["sd"]
        _line(top, curve.index, [loss, loss - sd, loss + sd], run, styles[run])
        difference = curve["loss"] - curves[baseline]["loss"]
        smoothed = difference.rolling(smooth, min_periods=1).mean()
        below.plot(difference.index, smoothed, gid=f"run:{run}", **styles[run])
    top.set_ylabel(f"{kind} loss, nats per token")
    below.set_ylabel(f"minus {baseline}, nats")
    below.set_xlabel(f"step (below: mean of {smooth} steps)" if smooth > 1 else "step")
    _legend(figure, top)
    return figure


@mpl.rc_context(STYLE)
def bytes_quality_plot(compared: pd.DataFrame, baseline: str) -> Figure:
    """Plot validation perplexity over the compression ratio of `aggregate.comparison`."""
    figure = _figure(4.4)
    axes = figure.subplots()
    styles = line_styles(compared.index, baseline)
    engines = list(dict.fromkeys(compared["engine"]))
    known = compared[np.isfinite(compared["val_ppl"])]
    ratios = _side_by_side(known["compression_ratio"])
    for run, row in known.iterrows():
        drawn = axes.errorbar(
            ratios[run],
            row["val_ppl"],
            yerr=row["val_ppl_sd"] if math.isfinite(row["val_ppl_sd"]) else None,
            color=styles[run]["color"],
            marker=MARKERS[engines.index(row["engine"]) % len(MARKERS)],
            markersize=7,
            fillstyle=FILLS[DASHES.index(styles[run]["linestyle"])],
            capsize=3,
            linestyle="none",
            label=run,
        )
        for part in drawn.get_children():
            part.set_gid(f"run:{run}")
    if len(known) and ratios.max() / ratios.min() >= LOG_SCALE_FROM:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if baseline in known.index:
        axes.axhline(known.loc[baseline, "val_ppl"], color=BASELINE_COLOUR, linewidth=0.8)
    axes.set_xlabel("compression ratio, raw / wire (equal ratios side by side)")
    axes.set_ylabel("validation perplexity, mean ± sd")
    _legend(figure, axes)
    return figure


def _side_by_side(ratios: pd.Series) -> pd.Series:
    """Move points of nearly equal ratio apart, in the order of the runs, by 6 % at most."""
    group = (np.log(ratios) / 0.1).round()
    number = ratios.groupby(group).cumcount()
    count = ratios.groupby(group).transform("size")
    apart = 0.12 / (count - 1).clip(lower=2)
    return ratios * np.exp(apart * (number - (count - 1) / 2))


@mpl.rc_context(STYLE)
def breakdown_plot(rows: pd.DataFrame) -> Figure:
    """Plot compute, exposed communication, exposed copies and idle time as stacked bars.

    Args:
        rows: of `timings.timing_table`, of one timing.
    """
    traced = rows[rows["run"] != NO_COMMUNICATION].set_index("run")
    traced = traced.dropna(subset=["profiled_step_ms"])
    if traced.empty:
        return message("No traced steps.")
    figure, axes = _bars(len(traced))
    ordered = traced.iloc[::-1]
    left = pd.Series(0.0, index=ordered.index)
    for name, label, colour in (
        ("compute_ms", "compute", "#0072B2"),
        ("exposed_comm_ms", "exposed communication", "#D55E00"),
        ("exposed_copy_ms", "exposed copies", "#228833"),
        ("idle_ms", "idle", "#BBBBBB"),
    ):
        if name == "exposed_copy_ms" and not ordered[name].any():
            continue  # ranks on the CPU have none
        axes.barh(ordered.index, ordered[name], left=left, height=0.65, color=colour, label=label)
        left += ordered[name]
    share, worst = percent(traced["exposed_share"].max(), 0), traced["exposed_share"].idxmax()
    # not over the axes alone, which long names of runs leave narrow
    figure.suptitle(
        f"Exposed communication takes up to\n{share} of a step ({worst})",
        **{"x": 0.01, "ha": "left", "size": 10.5, "weight": "bold"},
    )
    axes.set_xlabel("ms per traced step, mean over ranks", x=1, ha="right")
    _legend(figure, axes)
    return figure


@mpl.rc_context(STYLE)
def scaling_plot(rows: pd.DataFrame, runs: Sequence[str], baseline: str) -> Figure:
    """Plot tokens per second by ranks; below, the fraction of backward with communication.

    Args:
        rows: of `timings.timing_table`, without an emulated link.
        runs: in the order of their colours in all plots; others follow.
    """
    rows = rows[rows["run"] != ONE_DEVICE]
    rows = rows[rows.groupby("run")["world_size"].transform("nunique") > 1]
    if rows.empty:
        return message("No timings of several numbers of ranks without an emulated link.")
    styles = line_styles([*runs, *rows["run"]], baseline)
    figure = _figure(5.4)
    top, below = figure.subplots(2, 1, sharex=True)
    for run, timed in rows.sort_values("world_size", kind="stable").groupby("run", sort=False):
        is_bound = run == NO_COMMUNICATION
        style = {**styles[run], "marker": "x" if is_bound else "o", "markersize": 4}
        style["gid"] = f"run:{run}"
        top.plot(timed["world_size"], timed["tokens_per_s"], label=run, **style)
        if not is_bound:
            below.plot(timed["world_size"], 100 * timed["backward_comm_share"], **style)
    top.set_ylim(bottom=0)
    top.set_ylabel("tokens/s, all ranks")
    below.set_ylim(0, 100)
    below.set_ylabel("communication,\n% of backward")
    below.set_xlabel("ranks")
    sizes = sorted(set(rows["world_size"]))
    below.set_xticks(sizes, [str(size) for size in sizes])
    _legend(figure, top)
    return figure


@mpl.rc_context(STYLE)
def crossover_plot(
    groups: Sequence[pd.DataFrame], timed: Iterable[str], runs: Sequence[str], baseline: str
) -> Figure:
    """Plot step times by link rate, at equal tokens, a panel per number of ranks and delay.

    Args:
        groups: `timings.crossovers`; what has no emulated link is right of all rates.
        timed: names of timed runs, which may include others than `runs`.
        runs: in the order of their colours in all plots; others follow.
    """
    if not groups:
        return message("No timing on an emulated link.")
    styles = line_styles([*runs, *timed], baseline)
    figure = _figure(1.4 + 3.0 * len(groups))
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        right = 3 * group["bits_per_second"].max()
        ticks = {rate: number(rate, "bit/s") for rate in sorted(group["bits_per_second"].dropna())}
        if group["bits_per_second"].isna().any():
            ticks[right] = LOOPBACK
        for run, rows in group[group["run"] != NO_COMMUNICATION].groupby("run", sort=False):
            step = rows["step_ms"]
            style = {**styles[run], "marker": "o", "markersize": 4}
            _line(axes, rows["bits_per_second"].fillna(right), [step, step, step], run, style)
        axes.set_xscale("log")
        axes.set_yscale("log", base=2)
        axes.set_xticks([*ticks], [*ticks.values()])
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylabel("ms per step, equal tokens")
        axes.set_title(group_title(group))
    panels[-1].set_xlabel("link rate")
    _legend(figure, *panels)
    return figure


@mpl.rc_context(STYLE)
def forecast_plot(points: Sequence[Point], runs: Sequence[str], baseline: str) -> Figure:
    """Plot predicted throughput by ranks, a panel per cluster, with the 95 % interval of the fits.

    Args:
        runs: in the order of their colours in all plots; others follow.
    """
    table = pd.DataFrame([point.model_dump() for point in points])
    styles = line_styles([*runs, *table["run"]], baseline)
    down = -(-table["link"].nunique() // _ACROSS)
    figure = _figure(1.2 + 1.7 * down)
    panels = figure.subplots(down, _ACROSS, sharex=True, sharey=True, squeeze=False).flatten()
    clusters = [*table.groupby("link", sort=False)]
    for axes, (link, cluster) in zip(panels, clusters, strict=False):
        for run, line in cluster.groupby("run", sort=False):
            shares = [
                100 * line["compute_ms"] / line[f"{end}_ms"] for end in ("step", "low", "high")
            ]
            # an interval of few observations may begin at 0 ms
            _line(axes, line["ranks"], [s.clip(upper=_TOP) for s in shares], run, styles[run])
        axes.set_title(link, fontsize=9)
        axes.set_xscale("log", base=2)
        sizes = sorted(table["ranks"].unique())
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7, rotation=45)
        axes.set_ylim(0, _TOP)
    for spare in panels[len(clusters) :]:
        spare.set_visible(False)
    for axes in panels[: len(clusters)][-_ACROSS:]:
        axes.set_xlabel("ranks")
    figure.supylabel("% of a rank without communication", fontsize=9)
    _legend(figure, panels[0])
    return figure


def _line(
    axes: Axes, x: pd.Series, y: Sequence[pd.Series], label: str, style: dict[str, Any]
) -> None:
    """Draw a line with a band between two others."""
    axes.plot(x, y[0], label=label, gid=f"run:{label}", **style)
    band = axes.fill_between(x, y[1], y[2], color=style["color"], alpha=0.12, linewidth=0)
    band.set_gid(f"run:{label}")
