"""Time to one loss on slow links, from the records that are there.

Time to a loss is steps to it times the mean step. Steps: each method is trained with several
lengths, each with its own end of the learning rate; the length that ends at the loss of 2,000
steps of stock torch is interpolated in log steps for the first seed. With the other seeds each
method is trained with the shorter of the two lengths around it: what its loss differs by moves the
length along the same slope.
Ratios have 95 % intervals, of the seeds and of the repetitions of the timing together; ratios of
one seed have none.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import publish, text_table
from benchmarks.islands.curves import Curve, LinkTimes, Row, mean_of, records_of
from benchmarks.islands.methods import (
    FOLDER,
    LARGER,
    LARGER_STEPS,
    METHODS,
    STOCK,
    TARGET,
    TARGET_LENGTHS,
    TARGET_STEPS,
    parameters,
    steps_of_equal_tokens,
    strategies,
    sync_of,
)
from benchmarks.islands.timing import LINKS, NODES, RARE, valid_timings
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.core.errors import UserError
from shardlab.core.numbers import ABSENT, figure, percent, within
from shardlab.report import plots
from shardlab.report.tables import Table
from stages.readme import replace_block

_ALONE = "one-device"
_UNCOMPRESSED = "-fp32"
"""ends the names of methods whose exchanges have no codec"""
_BELOW = "diloco32-warm", "streaming32-warm", "diloco32-fp32", "manual-int8-w8"
"""methods that are named below their points, since others are above these"""
_FAMILIES = {
    "one device": (_ALONE,),
    "stock torch": tuple(name for name in METHODS if name.startswith(TARGET) or name == "hsdp"),
    "compressed steps": tuple(
        name for name in METHODS if name.startswith(("ddp-", "manual-")) or name == "hsdp-int8"
    ),
    "rare exchanges": tuple(name for name in METHODS if sync_of(name) is not None),
}


def crossing(gains: Sequence[tuple[float, float]]) -> str:
    """Return the ratio of synchronisation to computation at which a gain falls below 1.

    Args:
        gains: ratios, ascending, with their gains.
    """
    if not gains or gains[0][1] <= 1:
        return "never, in what was timed"
    for (ratio, gain), (more, less) in itertools.pairwise(gains):
        if gain > 1 >= less:
            share = math.log(gain) / math.log(gain / less)
            return figure(ratio ** (1 - share) * more**share, 2)
    return f"beyond {figure(gains[-1][0], 2)}"


def rows_of(curves: Mapping[str, Curve]) -> list[Row]:
    """Return the methods that reach the loss; stock ones with each engine of torch."""
    rows = []
    for name, curve in curves.items():
        logs = curve.steps_to(curves[TARGET])
        if logs:
            engines = STOCK if name.startswith(TARGET) else (None,)
            rows += [Row(name, engine, logs) for engine in engines]
    return rows


def fastest(rows: Sequence[Row], names: Iterable[str], times: LinkTimes) -> Row | None:
    """Return the method among some that reaches the loss first on a link."""
    return min((r for r in rows if r.name in names), key=times.seconds, default=None)


def quality_table(curves: Mapping[str, Curve]) -> Table:
    """Return losses, steps to the loss of the target, and perplexity after equal tokens."""
    target, rows = curves[TARGET], []
    for name, curve in curves.items():
        lengths = sorted({steps for at in curve.records.values() for steps in at})
        losses = [[curve.loss(seed, steps) for seed in curve.records] for steps in lengths]
        means = [_mean_known(at) for at in losses]
        shown = ", ".join(f"{n:,}: {figure(m, 4)}" for n, m in zip(lengths, means, strict=True))
        logs, over = curve.steps_to(target), curve.perplexity_over(target)
        rows.append(
            [
                name,
                str(len(curve.records)),
                f"{curve.rate:g}",
                shown,
                within(*mean_of([*logs.values()]).ratio, 0) if logs else ABSENT,
                ABSENT if over is None else within(*over, 3),
                figure(curve.mean_bytes() / 1e3),
            ]
        )
    headings = (
        *("method", "seeds", "learning rate", "validation loss by steps"),
        *("steps to the loss", "perplexity after equal tokens", "kB per step and rank"),
    )
    return text_table("Losses and steps", headings, rows)


def lengths_table(curves: Mapping[str, Curve]) -> Table:
    """Return the perplexity over that of the target at equal tokens, by the length of the run."""
    target, lengths = curves[TARGET], (TARGET_STEPS, *TARGET_LENGTHS)
    rows = []
    for name, curve in curves.items():
        over = [curve.perplexity_over(target, steps) for steps in lengths]
        if name != TARGET and any(over[1:]):
            rows.append([name, *(ABSENT if each is None else within(*each, 3) for each in over)])
    headings = ("method", *(f"after {steps:,} steps of {TARGET}" for steps in lengths))
    return text_table("Perplexity over that of stock torch, by length", headings, rows)


def exchanges_table(curves: Mapping[str, Curve]) -> Table:
    """Return the perplexity of compressed exchanges over that of the same ones uncompressed, at
    equal tokens."""
    rows = []
    for name in METHODS:
        plain = f"{name.removesuffix('-int8')}{_UNCOMPRESSED}"
        over = None
        if name in curves and plain in curves:
            over = curves[name].perplexity_over(curves[plain])
        if over is not None:
            rows.append([name, plain, within(*over, 3)])
    headings = ("method", "uncompressed", "perplexity over that of uncompressed exchanges")
    return text_table("Codecs of the exchanges", headings, rows)


def larger_table(curves: Mapping[str, Curve]) -> Table | None:
    """Return the perplexity over that of the target with the larger model, beside the small one's;
    None if it was not trained."""
    losses = {}
    for name in (name for name in LARGER if name in curves):
        run = steps_of_equal_tokens(name, LARGER_STEPS), curves[name].rate / 2
        for record in records_of(name, "larger"):
            if (record["steps"], record["learning_rate"]) == run:
                losses[name] = record["val_loss"], record["parameters"]
    if TARGET not in losses:
        return None
    rows = []
    for name, (loss, _) in losses.items():
        small = curves[name].perplexity_over(curves[TARGET])
        ratio = math.exp(loss - losses[TARGET][0])
        rows.append([name, figure(loss, 4), f"{ratio:.3f}", within(*small, 3) if small else ABSENT])
    headings = (
        *("method", f"validation loss, tokens of {LARGER_STEPS} steps of {TARGET}"),
        *("perplexity over that of stock", "of the small model"),
    )
    size = figure(losses[TARGET][1] / 1e6, 2)
    return text_table(f"A larger model: {size} M parameters, one seed", headings, rows)


@mpl.rc_context(plots.STYLE)
def bytes_plot(curves: Mapping[str, Curve]) -> Figure:
    """Plot the perplexity after equal tokens by the bytes that a rank sends for a micro-batch."""
    drawing = Figure((1.5 * plots.WIDTH, 4.4), layout="constrained")
    axes = drawing.subplots()
    for number, (family, names) in enumerate(_FAMILIES.items()):
        colour = plots.BASELINE_COLOUR if family == "one device" else plots.COLOURS[number - 1]
        label: str | None = family
        for name in names:
            curve = curves.get(name)
            over = None if curve is None else curve.perplexity_over(curves[TARGET])
            if curve is None or over is None or METHODS[name].world_size > 2:
                continue
            if name == _ALONE:
                axes.axhline(over.ratio, color=colour, linestyle="--", label=family)
                continue
            point = (curve.mean_bytes() / 1e3 / METHODS[name].accumulation, over.ratio)
            axes.scatter(*point, color=colour, marker=plots.MARKERS[number], label=label)
            offset = 4, -9 if name in _BELOW else 3
            axes.annotate(name, point, offset, textcoords="offset points", fontsize=7)
            label = None
    axes.set(xscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("kB per micro-batch and rank, mean over the run")
    axes.set_ylabel("perplexity over that of stock torch, equal tokens")
    axes.legend()
    return drawing


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def times_table(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Table:
    """Return the minutes to the loss on each link, and of the step the share that computes."""
    headings = ["method", *(f"{link.name}: minutes, computing" for link in links)]
    cells = [
        [
            row.title,
            *(
                f"{figure(link.seconds(row) / 60)}, {percent(_computing(link, row))}"
                for link in links
            ),
        ]
        for row in rows
    ]
    return text_table("Time to the loss", headings, cells)


def _computing(link: LinkTimes, row: Row) -> float:
    alone = link.step(NO_COMMUNICATION, METHODS[row.name].accumulation)
    return alone.over(link.of(row)).ratio.ratio


def lookup_table(
    rows: Sequence[Row], links: Sequence[LinkTimes], curves: Mapping[str, Curve]
) -> Table:
    """Return what is fastest at each ratio of synchronisation to computation, and its gains."""
    cells = []
    for link in sorted(links, key=lambda link: link.ratio):
        best = fastest(rows, METHODS, link)
        if best is None:
            continue
        over = curves[best.name].perplexity_over(curves[TARGET])
        others = [fastest(rows, names, link) for names in list(_FAMILIES.values())[:3]]
        plain = next((row for row in rows if row.title == link.stock), None)
        cells.append(
            [
                figure(link.ratio, 2),
                link.name,
                best.title,
                *(_gain(link, best, other) for other in (*others, plain)),
                ABSENT if over is None else within(*over, 3),
            ]
        )
    headings = (
        *("synchronisation / computation", "link", "first at the loss"),
        *(f"over {family}" for family in list(_FAMILIES)[:3]),
        *("over stock FSDP2 or HSDP", "perplexity after equal tokens"),
    )
    return text_table("What to use", headings, cells)


def _gain(link: LinkTimes, best: Row, other: Row | None) -> str:
    if other is None or other == best:
        return ABSENT
    return f"{within(*link.gain(best, other), 2)} of {other.title}"


def steps_table(links: Sequence[LinkTimes]) -> Table:
    """Return the steps of all strategies over those of stock torch on each link."""
    headings = (
        "strategy",
        *(f"{link.name}, synchronisation / computation {figure(link.ratio, 2)}" for link in links),
    )
    names = dict.fromkeys(name for link in links for name in link.strategies())
    cells = [
        [
            name,
            *(
                within(*link.over(name, link.stock), 3) if name in link.strategies() else ABSENT
                for link in links
            ),
        ]
        for name in names
    ]
    return text_table("Step over that of stock torch", headings, cells)


def rare_table(links: Sequence[LinkTimes], curves: Mapping[str, Curve]) -> Table:
    """Return the steps of rare exchanges over those without communication, and the share that
    computes."""
    cells = []
    for link in links:
        for strategy in link.strategies():
            sync = None if strategy == NO_COMMUNICATION else strategies()[strategy].sync
            if sync is None:
                continue
            step = link.over(strategy, NO_COMMUNICATION)
            curve = curves.get(strategy)
            over = None if curve is None else curve.perplexity_over(curves[TARGET])
            cells.append(
                [
                    link.name,
                    strategy,
                    within(*step, 3),
                    percent(1 / step.ratio),
                    figure(sync.every * (step.ratio - 1), 3),
                    ABSENT if over is None else within(*over, 3),
                ]
            )
    headings = (
        *("link", "method", "step over one without communication", "computing"),
        *("exchange, in steps of computation", "perplexity after equal tokens"),
    )
    return text_table("Rare exchanges on slow links", headings, cells)


def pays_table(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Table:
    """Return up to which ratio a second machine gains over one, by family."""
    alone = next((row for row in rows if row.name == _ALONE), None)
    cells = []
    for family, names in _FAMILIES.items():
        if alone is None or family == "one device":
            continue
        points = []
        for link in sorted(links, key=lambda link: link.ratio):
            row = fastest(rows, names, link)
            if row is not None:
                points.append((link.ratio, link.gain(row, alone).ratio))
        cells.append([family, crossing(points)])
    return text_table("Where a second machine pays", ("family", "up to the ratio"), cells)


@mpl.rc_context(plots.STYLE)
def gain_plot(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Figure:
    """Plot the gain over one device by the ratio of synchronisation to computation."""
    alone = next((row for row in rows if row.name == _ALONE), None)
    ordered = sorted(links, key=lambda link: link.ratio)
    drawing = Figure((plots.WIDTH, 3.4), layout="constrained")
    axes = drawing.subplots()
    for number, (family, names) in enumerate(_FAMILIES.items()):
        best = [fastest(rows, names, link) for link in ordered]
        gains = [
            (link.ratio, link.gain(row, alone))
            for link, row in zip(ordered, best, strict=True)
            if row and alone
        ]
        if not gains:
            continue
        x, y = [at for at, _ in gains], [gain.ratio for _, gain in gains]
        colour = plots.BASELINE_COLOUR if family == "one device" else plots.COLOURS[number - 1]
        axes.plot(x, y, label=family, color=colour, marker=plots.MARKERS[number])
    axes.set(xscale="log", ylim=(0, None))
    ticks = [f"{figure(link.ratio, 2)}\n{link.name}" for link in ordered]
    axes.set_xticks([link.ratio for link in ordered], ticks, fontsize=7)
    axes.set_xticks([], minor=True)
    axes.set_xlabel("synchronisation of stock FSDP2 / computation")
    axes.set_ylabel("times as fast to the loss as one device")
    axes.legend()
    return drawing


def write_report() -> None:
    """Write islands.md, its plots and the block of README.md."""
    curves = {name: Curve(name) for name in METHODS if (FOLDER / "runs" / name).is_dir()}
    if TARGET not in curves:
        raise UserError(f"{FOLDER}: no run of {TARGET} yet: run python -m benchmarks.islands")
    links, rare, nodes = (
        [LinkTimes(name) for name in names if valid_timings(parameters(), name)]
        for names in (LINKS, RARE, NODES)
    )
    two, four = (
        [
            row
            for row in rows_of(curves)
            if METHODS[row.name].world_size in (1, ranks) and all(link.has(row) for link in timed)
        ]
        for ranks, timed in ((2, links), (4, nodes))
    )
    parts: list[Table | str] = []
    if links:
        lookup = lookup_table(two, links, curves)
        parts += [lookup, pays_table(two, links), times_table(two, links)]
        plots.save(gain_plot(two, links), FOLDER / "gain.svg")
        plot = f"![gain over one device by the ratio]({FOLDER}/gain.svg)"
        replace_block(Path("README.md"), f"{plot}\n\n{lookup.markdown()}", "islands")
    if rare:
        parts.append(rare_table(rare, curves))
    if nodes:
        parts.append("# Two nodes of two ranks\n")
        parts.append(steps_table(nodes))
        if any(METHODS[row.name].world_size == 4 for row in four):
            parts += [lookup_table(four, nodes, curves), times_table(four, nodes)]
    parts.append("# Quality, whatever the link\n")
    parts += [quality_table(curves), lengths_table(curves), exchanges_table(curves)]
    plots.save(bytes_plot(curves), FOLDER / "bytes.svg")
    parts.append("\n![perplexity by the bytes of a step](bytes.svg)\n")
    larger = larger_table(curves)
    parts += [] if larger is None else [larger]
    folders = "runs", "larger"
    hosts = {r["host"] for name in curves for folder in folders for r in records_of(name, folder)}
    measured = [f"Trained on: {', '.join(sorted(hosts))}"]
    for link in (*links, *rare, *nodes):
        measured.append(f"Timed on: {link.name}: {link.machine}")
    publish(__doc__, FOLDER / "islands.md", *parts, measured=measured)
