"""Plots of runs, and the style of all plots: a run has the same colour in each of them.

Figures are drawn without a display. Equal data give equal files: identifiers inside an SVG come
from a fixed salt and no date or version is written.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TextIO

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.report.numbers import figure as number
from shardlab.report.numbers import within
from shardlab.report.paired import verdict

BASELINE_COLOUR = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5195", "#767676")
"""Okabe and Ito's colours, distinct under any colour vision; violet and grey replace yellow, which
is hard to see on white"""
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LOG_SCALE_FROM = 4.0
"""ratio of the largest to the smallest bar or point from which an axis is logarithmic"""

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
WIDTH = 4.7
"""inches: narrow, so that the text stays readable when a phone scales the figure to its width"""


def save(figure: Figure, file: Path | TextIO, kind: Literal["svg", "png"]) -> None:
    """Write a figure; equal figures give equal bytes."""
    unstamped = ("Date", "Creator", "Format", "Type") if kind == "svg" else ("Software",)
    with mpl.rc_context(STYLE):
        figure.savefig(file, format=kind, dpi=160, metadata=dict.fromkeys(unstamped))


def line_styles(runs: Iterable[str], baseline: str) -> dict[str, dict[str, Any]]:
    """Return colour, dashes and width of each run, and of the no-communication bound, dotted.

    The baseline is black; the others take the palette in their order, with another dash pattern
    each time that the palette begins again.
    """
    runs = [*dict.fromkeys(run for run in runs if run != NO_COMMUNICATION)]
    others = [run for run in runs if run != baseline]
    colours = {run: COLOURS[i % len(COLOURS)] for i, run in enumerate(others)}
    dashes = {run: DASHES[i // len(COLOURS) % len(DASHES)] for i, run in enumerate(runs)}
    dashes[NO_COMMUNICATION] = (0, (1, 2))
    return {
        run: {"color": colours.get(run, BASELINE_COLOUR), "linestyle": dash, "linewidth": 1.3}
        for run, dash in dashes.items()
    }


def new_figure(height: float) -> Figure:
    """Return an empty figure of the common width; the height is in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


@mpl.rc_context(STYLE)
def loss_plot(losses: pd.DataFrame, runs: Sequence[str], baseline: str) -> Figure:
    """Plot mean training losses with their band over seeds; below, minus that of the baseline.

    Args:
        losses: `aggregate.loss_curves`.
    """
    figure = new_figure(5.2)
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    styles = line_styles(runs, baseline)
    curves = {run: losses[losses["run"] == run].set_index("step") for run in runs}
    smooth = max(1, len(curves[baseline]) // 20)
    for run, curve in curves.items():
        top.plot(curve.index, curve["loss"], label=run, **styles[run])
        band = curve["loss"] - curve["sd"], curve["loss"] + curve["sd"]
        top.fill_between(curve.index, *band, color=styles[run]["color"], alpha=0.12, linewidth=0)
        difference = curve["loss"] - curves[baseline]["loss"]
        below.plot(
            difference.index, difference.rolling(smooth, min_periods=1).mean(), **styles[run]
        )
    means = {run: curve["loss"].tail(smooth).mean() for run, curve in curves.items()}
    ends = {run: mean for run, mean in means.items() if math.isfinite(mean)}
    if ends:
        best, worst = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
        top.set_title(
            f"Loss ends between {number(ends[best])} ({best})\nand {number(ends[worst])} ({worst})"
        )
    top.set_ylabel("training loss, nats per token")
    below.set_ylabel(f"minus {baseline}, nats")
    below.set_xlabel(f"step (below: mean of {smooth} steps)" if smooth > 1 else "step")
    figure.legend(
        *top.get_legend_handles_labels(), loc="outside lower center", ncols=3, columnspacing=1.0
    )
    return figure


@mpl.rc_context(STYLE)
def step_time_plot(compared: pd.DataFrame, baseline: str) -> Figure:
    """Plot step times as bars, fastest on top, with the deviation over repetitions.

    Args:
        compared: `aggregate.comparison`.
    """
    ordered = compared.sort_values("step_ratio", ascending=False, kind="stable")
    figure, axes = _bars(len(ordered))
    styles = line_styles(compared.index, baseline)
    axes.barh(
        ordered.index,
        ordered["step_ms"],
        xerr=None if ordered["step_ms_sd"].isna().all() else ordered["step_ms_sd"],
        color=[styles[run]["color"] for run in ordered.index],
        error_kw={"ecolor": "#666666", "capsize": 3},
        height=0.65,
    )
    axes.axvline(ordered.loc[baseline, "step_ms"], color=BASELINE_COLOUR, linewidth=0.8)
    fastest = ordered.index[-1]
    row = ordered.loc[fastest]
    ratio = within(row["step_ratio"], row["step_ratio_low"], row["step_ratio_high"], 2)
    axes.set_title(
        f"{baseline} has the shortest step"
        if fastest == baseline
        else f"{fastest} has the shortest step:\n{ratio} times that of {baseline}"
    )
    axes.set_xlabel("ms per step, mean ± standard deviation over repetitions")
    return figure


@mpl.rc_context(STYLE)
def bytes_quality_plot(compared: pd.DataFrame, baseline: str) -> Figure:
    """Plot validation perplexity over the compression ratio of `aggregate.comparison`."""
    figure = new_figure(4.4)
    axes = figure.subplots()
    styles = line_styles(compared.index, baseline)
    spread = compared["compression_ratio"].max() / compared["compression_ratio"].min()
    engines = list(dict.fromkeys(compared["engine"]))
    positions = _side_by_side(compared["compression_ratio"], spread)
    known = compared[np.isfinite(compared["val_ppl"])]
    for run, row in known.iterrows():
        axes.errorbar(
            positions[run],
            row["val_ppl"],
            yerr=row["val_ppl_sd"] if math.isfinite(row["val_ppl_sd"]) else None,
            color=styles[run]["color"],
            marker=MARKERS[engines.index(row["engine"]) % len(MARKERS)],
            markersize=7,
            markeredgecolor="white",
            capsize=3,
            linestyle="none",
            label=run,
        )
    if spread >= LOG_SCALE_FROM:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if baseline in known.index:
        axes.axhline(known.loc[baseline, "val_ppl"], color=BASELINE_COLOUR, linewidth=0.8)
        most = known["compression_ratio"].idxmax()
        axes.set_title(
            f"{number(known.loc[most, 'compression_ratio'])} times fewer bytes ({most})\n"
            f"{_cost(known.loc[most], baseline)}"
        )
    axes.set_xlabel("compression ratio, raw / wire (equal ratios side by side)")
    axes.set_ylabel("validation perplexity, mean ± sd")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _cost(row: pd.Series, baseline: str) -> str:
    """Return the end of a title: perplexity relative to the baseline."""
    judged = verdict(row["ppl_ratio_low"], row["ppl_ratio_high"], 1)
    if judged == "same":
        most = max(abs(row[f"ppl_ratio_{end}"] - 1) for end in ("low", "high"))
        return f"at a perplexity within {number(100 * most, 2)} % of {baseline}'s"
    change = 100 * (row["ppl_ratio"] - 1)
    direction = "lower" if change < 0 else "higher"
    seeds = " (one seed)" if judged == "unknown" else ""
    return f"at {number(abs(change), 2)} % {direction} perplexity than {baseline}{seeds}"


def _side_by_side(ratios: pd.Series, spread: float) -> dict[str, float]:
    """Move points of nearly equal ratio apart, in the order of the runs."""
    step = 1 + 0.025 * max(1.0, math.log2(spread)) if spread > 1 else 1.02
    groups: dict[float, list[str]] = {}
    for run, ratio in ratios.items():
        groups.setdefault(round(math.log(ratio) / 0.1), []).append(str(run))
    return {
        run: ratios[run] * step ** (i - (len(group) - 1) / 2)
        for group in groups.values()
        for i, run in enumerate(group)
    }


@mpl.rc_context(STYLE)
def breakdown_plot(compared: pd.DataFrame) -> Figure:
    """Plot compute, exposed communication, exposed copies and idle time as stacked bars."""
    figure, axes = _bars(len(compared), legend_height=0.5)
    ordered = compared.iloc[::-1]
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
    share = compared["exposed_comm_ms"] / compared["profiled_step_ms"]
    least, most = f"{100 * share.min():.0f}", f"{100 * share.max():.0f}"
    axes.set_title(
        f"Exposed communication takes {most} %\nof a step in every run"
        if least == most
        else f"Exposed communication: {least} % of a step\n"
        f"({share.idxmin()}) to {most} % ({share.idxmax()})"
    )
    axes.set_xlabel("ms per profiled step, mean over ranks and seeds")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _bars(count: int, legend_height: float = 0.0) -> tuple[Figure, Axes]:
    """Return a figure that fits so many horizontal bars."""
    figure = new_figure(1.3 + 0.31 * max(count, 3) + legend_height)
    axes = figure.subplots()
    axes.grid(axis="y", visible=False)
    return figure, axes
