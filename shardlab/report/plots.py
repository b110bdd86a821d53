"""The plots: one figure per question, the same colour for a run in all of them.

Figures are drawn without a display. Equal data give equal files: identifiers inside an SVG come
from a fixed salt and no date or version is written.
"""

import math
from pathlib import Path
from typing import Any, Literal, TextIO

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardlab.report.aggregate import verdict
from shardlab.report.numbers import figure as number
from shardlab.report.numbers import within

BASELINE_COLOUR = "#000000"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7A5195", "#767676")
"""Okabe and Ito's colours, told apart with any colour vision; violet and grey instead of yellow,
which is hard to see on white"""
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


def draw_all(compared: pd.DataFrame, losses: pd.DataFrame, baseline: str) -> dict[str, Figure]:
    """All plots by name.

    Args:
        compared: `aggregate.comparison`.
        losses: `aggregate.loss_curves`.
    """
    with mpl.rc_context(STYLE):
        return {
            "loss": _loss(losses, list(compared.index), baseline),
            "step_time": _step_time(compared, baseline),
            "bytes_quality": _bytes_quality(compared, baseline),
            "breakdown": _breakdown(compared),
        }


def save(figure: Figure, file: Path | TextIO, kind: Literal["svg", "png"]) -> None:
    """Writes a figure; the same figure always gives the same bytes."""
    nameless = ("Date", "Creator", "Format", "Type") if kind == "svg" else ("Software",)
    with mpl.rc_context(STYLE):
        figure.savefig(file, format=kind, dpi=160, metadata=dict.fromkeys(nameless))


def colours(runs: list[str], baseline: str) -> dict[str, str]:
    """Black for the baseline, then the palette in the order of the runs."""
    others = [run for run in runs if run != baseline]
    chosen = {run: COLOURS[i % len(COLOURS)] for i, run in enumerate(others)}
    return {**chosen, baseline: BASELINE_COLOUR}


def dashes(runs: list[str]) -> dict[str, object]:
    """A dash pattern per use of the palette, so that a colour used twice can be told apart."""
    return {run: DASHES[i // len(COLOURS) % len(DASHES)] for i, run in enumerate(runs)}


def _loss(losses: pd.DataFrame, runs: list[str], baseline: str) -> Figure:
    """Mean training loss with its band over seeds; below, the difference to the baseline."""
    figure = Figure(figsize=(WIDTH, 5.2), layout="constrained")
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    colour, dash = colours(runs, baseline), dashes(runs)
    curves = {run: losses[losses["run"] == run].set_index("step") for run in runs}
    smooth = max(1, len(curves[baseline]) // 20)
    for run, curve in curves.items():
        style = {"color": colour[run], "linestyle": dash[run], "linewidth": 1.3}
        top.plot(curve.index, curve["loss"], label=run, **style)
        band = curve["loss"] - curve["sd"], curve["loss"] + curve["sd"]
        top.fill_between(curve.index, *band, color=colour[run], alpha=0.12, linewidth=0)
        difference = curve["loss"] - curves[baseline]["loss"]
        below.plot(difference.index, difference.rolling(smooth, min_periods=1).mean(), **style)
    ends = {run: curve["loss"].tail(smooth).mean() for run, curve in curves.items()}
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


def _step_time(compared: pd.DataFrame, baseline: str) -> Figure:
    """Horizontal bars, fastest on top, with the deviation over seeds."""
    ordered = compared.sort_values("step_ms_mean", ascending=False, kind="stable")
    figure, axes = _bars(len(ordered))
    colour = colours(list(compared.index), baseline)
    axes.barh(
        ordered.index,
        ordered["step_ms_mean"],
        xerr=None if ordered["step_ms_mean_sd"].isna().all() else ordered["step_ms_mean_sd"],
        color=[colour[run] for run in ordered.index],
        error_kw={"ecolor": "#666666", "capsize": 3},
        height=0.65,
    )
    axes.axvline(ordered.loc[baseline, "step_ms_mean"], color=BASELINE_COLOUR, linewidth=0.8)
    fastest = ordered.index[-1]
    row = ordered.loc[fastest]
    ratio = within(row["step_ratio"], row["step_ratio_low"], row["step_ratio_high"], 2)
    axes.set_title(
        f"{baseline} has the shortest step"
        if fastest == baseline
        else f"{fastest} has the shortest step:\n{ratio} times that of {baseline}"
    )
    axes.set_xlabel("ms per step, mean ± standard deviation over seeds")
    return figure


def _bytes_quality(compared: pd.DataFrame, baseline: str) -> Figure:
    """What the saved bytes cost: validation perplexity over the compression ratio."""
    figure = Figure(figsize=(WIDTH, 4.4), layout="constrained")
    axes = figure.subplots()
    colour = colours(list(compared.index), baseline)
    spread = compared["compression_ratio"].max() / compared["compression_ratio"].min()
    engines = list(dict.fromkeys(compared["engine"]))
    places = _side_by_side(compared["compression_ratio"], spread)
    for run, row in compared.iterrows():
        axes.errorbar(
            places[run],
            row["val_ppl"],
            yerr=row["val_ppl_sd"] if math.isfinite(row["val_ppl_sd"]) else None,
            color=colour[run],
            marker=MARKERS[engines.index(row["engine"]) % len(MARKERS)],
            markersize=7,
            markeredgecolor="white",
            capsize=3,
            linestyle="none",
            label=run,
        )
    axes.axhline(compared.loc[baseline, "val_ppl"], color=BASELINE_COLOUR, linewidth=0.8)
    if spread >= LOG_SCALE_FROM:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    most = compared["compression_ratio"].idxmax()
    axes.set_title(
        f"{number(compared.loc[most, 'compression_ratio'])} times fewer bytes ({most})\n"
        f"{_cost(compared.loc[most], baseline)}"
    )
    axes.set_xlabel("compression ratio, raw / wire (equal ratios side by side)")
    axes.set_ylabel("validation perplexity, mean ± sd")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def _cost(row: pd.Series, baseline: str) -> str:
    """The end of a title: how far a run's perplexity is from the baseline's."""
    judged = verdict(row["ppl_ratio_low"], row["ppl_ratio_high"], 1)
    if judged == "same":
        most = max(abs(row[f"ppl_ratio_{end}"] - 1) for end in ("low", "high"))
        return f"at a perplexity within {number(100 * most, 2)} % of {baseline}'s"
    change = 100 * (row["ppl_ratio"] - 1)
    direction = "lower" if change < 0 else "higher"
    seeds = " (one seed)" if judged == "unknown" else ""
    return f"at {number(abs(change), 2)} % {direction} perplexity than {baseline}{seeds}"


def _side_by_side(ratios: pd.Series, spread: float) -> dict[str, float]:
    """Points of nearly the same ratio are moved apart a little, in the order of the runs."""
    step = 1 + 0.025 * max(1.0, math.log2(spread)) if spread > 1 else 1.02
    groups: dict[float, list[str]] = {}
    for run, ratio in ratios.items():
        groups.setdefault(round(math.log(ratio) / 0.1), []).append(str(run))
    return {
        run: ratios[run] * step ** (i - (len(group) - 1) / 2)
        for group in groups.values()
        for i, run in enumerate(group)
    }


def _breakdown(compared: pd.DataFrame) -> Figure:
    """Compute, exposed communication and idle time of a profiled step; they sum to the step."""
    figure, axes = _bars(len(compared), room=0.5)
    ordered = compared.iloc[::-1]
    left = pd.Series(0.0, index=ordered.index)
    for name, label, colour in (
        ("compute_ms", "compute", "#0072B2"),
        ("exposed_comm_ms", "exposed communication", "#D55E00"),
        ("idle_ms", "idle", "#BBBBBB"),
    ):
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


def _bars(count: int, room: float = 0.0) -> tuple[Figure, Axes]:
    """A figure whose height fits so many horizontal bars."""
    figure = Figure(figsize=(WIDTH, 1.3 + 0.31 * max(count, 3) + room), layout="constrained")
    axes = figure.subplots()
    axes.grid(axis="y", visible=False)
    return figure, axes
