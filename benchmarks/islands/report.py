"""Time to one loss on slow links, from the records that are there.

Time to a loss is steps to it times the mean step. Steps: each method is trained with several
lengths, each with its own end of the learning rate; the length that ends at the loss of 2,000
steps of stock torch is interpolated in log steps for the first seed. With the other seeds each
method is trained with the shorter of the two lengths around it: what its loss differs by moves the
length along the same slope.
One device trains the best of several numbers of micro-batches, as all others do: with twice as many
as each of two ranks it trains the same samples in each step, so these runs are shared.
Brackets hold 95 % intervals, of the seeds and of the repetitions of one timing together; ratios of
one seed have none. They do not hold the choice of the learning rate and of the fastest method by
the same runs, nor what another sitting on another machine would show.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import publish, text_table
from benchmarks.islands.curves import Curve, LinkTimes, Row, records_of
from benchmarks.islands.families import FAMILIES, ONE_DEVICE, Comparison, family_of, rows_of
from benchmarks.islands.methods import (
    FOLDER,
    LARGER,
    LARGER_STEPS,
    METHODS,
    TARGET,
    TARGET_LENGTHS,
    TARGET_STEPS,
    parameters,
    steps_of_equal_tokens,
    strategies,
)
from benchmarks.islands.plots import bytes_plot, gain_plot, gains_over_one_device
from benchmarks.islands.timing import LINKS, NODES, RARE, valid_timings
from shardlab.core.errors import UserError
from shardlab.core.numbers import ABSENT, figure, within
from shardlab.report import plots
from shardlab.report.tables import Table
from shardlab.results.interval import Ratio, geometric_mean
from shardlab.results.timing_result import NO_COMMUNICATION
from stages.readme import replace_block

_UNCOMPRESSED = "-fp32"
"""ends the names of methods that synchronise parameters without a codec"""


def quality_table(curves: Mapping[str, Curve]) -> Table:
    """Return losses, steps to the loss of the target, and perplexity after equal tokens."""
    target, rows = curves[TARGET], []
    for name, curve in curves.items():
        lengths = sorted({steps for at in curve.records.values() for steps in at})
        losses = [[curve.loss(seed, steps) for seed in curve.records] for steps in lengths]
        means = [_mean_known(at) for at in losses]
        shown = ", ".join(f"{n:,}: {figure(m, 4)}" for n, m in zip(lengths, means, strict=True))
        to_loss, over = curve.steps_to(target), curve.perplexity_over(target)
        rows.append(
            [
                name,
                str(len(curve.records)),
                f"{curve.rate:g}",
                shown,
                within(*geometric_mean([*to_loss.values()]), 0) if to_loss else ABSENT,
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


def codecs_table(curves: Mapping[str, Curve]) -> Table:
    """Return the perplexity of synchronised parameters with a codec over that without one, at
    equal tokens."""
    rows = []
    for name in METHODS:
        plain = f"{name.removesuffix('-int8')}{_UNCOMPRESSED}"
        over = None
        if name in curves and plain in curves:
            over = curves[name].perplexity_over(curves[plain])
        if over is not None:
            rows.append([name, plain, within(*over, 3)])
    headings = ("method", "without a codec", "perplexity over that without a codec")
    return text_table("Codecs of parameter synchronisation", headings, rows)


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


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def times_table(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Table:
    """Return the minutes to the loss on each link."""
    cells = [[row.title, *(figure(link.seconds(row) / 60) for link in links)] for row in rows]
    return text_table("Minutes to the loss", ("method", *(link.name for link in links)), cells)


def tuning_table(curves: Mapping[str, Curve]) -> Table:
    """Return what each kind of method was tuned over: micro-batches, and learning rates."""
    rows = []
    for family, names in FAMILIES.items():
        for name in names:
            if name not in curves:
                continue
            curve = curves[name]
            rates = sorted(curve.tuning)
            bracketed = rates[0] < curve.rate < rates[-1]
            rows.append(
                [
                    family,
                    name,
                    str(curve.method.accumulation),
                    ", ".join(f"{rate:g}" for rate in rates),
                    f"{curve.rate:g}" if bracketed else f"{curve.rate:g} (not between two others)",
                    "itself" if curve.tuned_as == name else curve.tuned_as,
                    "itself" if curve.trained_as == name else curve.trained_as,
                ]
            )
    headings = (
        *("kind", "method", "micro-batches of a step", "learning rates tried", "best"),
        *("tried with", "trained as"),
    )
    return text_table("What was tuned", headings, rows)


def what_to_use(
    rows: Sequence[Row], links: Sequence[LinkTimes], curves: Mapping[str, Curve]
) -> tuple[Table, Table]:
    """Return the method to use by the ratio of synchronisation to computation: with its gain over
    one device and over the kind on two machines whose interval begins lowest, and with that over
    each kind and the methods that it is not told apart from."""
    short, full = [], []
    for link in sorted(links, key=lambda link: link.ratio):
        comparison = Comparison(rows, link)
        best = comparison.first(METHODS)
        if best is None:
            continue
        gains = {}
        for family, names in FAMILIES.items():
            row = comparison.first(names)
            if row is not None and family != family_of(best):
                gains[family] = link.gain(best, row), row.title
        over = curves[best.name].perplexity_over(curves[TARGET])
        quality = ABSENT if over is None else within(*over, 3)
        beginning = [_ratio(link), link.name, best.title]
        alone = within(*gains[ONE_DEVICE][0], 2) if ONE_DEVICE in gains else ABSENT
        next_best = min(
            (family for family in gains if family != ONE_DEVICE),
            key=lambda family: np.nan_to_num(gains[family][0].low),
            default=None,
        )
        short.append(
            [*beginning, alone, ABSENT if next_best is None else _over(*gains[next_best]), quality]
        )
        cells = (_over(*gains[family]) if family in gains else ABSENT for family in FAMILIES)
        same = (row.title for row in comparison.same_as(best))
        full.append([*beginning, *cells, ", ".join(same) or ABSENT])
    headings = "synchronisation / computation", "link", "fastest"
    return (
        text_table(
            "What to use",
            (
                *headings,
                "gain over one device",
                "least certain gain over another kind on two machines",
                "perplexity after equal tokens",
            ),
            short,
        ),
        text_table(
            "Over the best of each kind",
            (*headings, *(f"gain over {family}" for family in FAMILIES), "not told apart from it"),
            full,
        ),
    )


def _over(gain: Ratio, title: str) -> str:
    """Format a gain over a method, and say where no interval is above 1."""
    return f"{within(*gain, 2)} {title}" + ("" if gain.low > 1 else ": not told apart")


def _ratio(link: LinkTimes) -> str:
    """Format the ratio of synchronisation to computation on a link."""
    ratio, low, high = (figure(end - 1, 2) for end in link.stock_over_bound)
    return f"{ratio} ({low} to {high})"


def steps_table(links: Sequence[LinkTimes]) -> Table:
    """Return the steps of all strategies over those of stock torch on each link."""
    headings = (
        "strategy",
        *(f"{link.name}, synchronisation / computation {_ratio(link)}" for link in links),
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
    """Return the steps of methods that synchronise parameters over those without communication."""
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
                    figure(sync.every * (step.ratio - 1), 3),
                    ABSENT if over is None else within(*over, 3),
                ]
            )
    headings = (
        *("link", "method", "step over one without communication"),
        *("synchronisation, in steps of computation", "perplexity after equal tokens"),
    )
    return text_table("Parameter synchronisation on slow links", headings, cells)


def pays_table(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Table:
    """Return the gain over one device by kind of method and link."""
    ordered = sorted(links, key=lambda link: link.ratio)
    cells = [
        [family, *(within(*gain, 2) for _, gain in gains)]
        for family, gains in gains_over_one_device(rows, ordered).items()
        if family != ONE_DEVICE
    ]
    headings = (f"at {figure(link.ratio, 2)}, {link.name}" for link in ordered)
    return text_table("Gain over one device", ("kind", *headings), cells)


def write_report() -> None:
    """Write islands.md, its plots and the block of README.md."""
    trained = {name: METHODS[name].same_as or name for name in METHODS}
    curves = {name: Curve(name) for name in METHODS if (FOLDER / "runs" / trained[name]).is_dir()}
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
        short, full = what_to_use(two, links, curves)
        parts += [short, full, pays_table(two, links), times_table(two, links)]
        plots.save(gain_plot(two, links), FOLDER / "gain.svg")
        plot = f"![gain over one device by the ratio]({FOLDER}/gain.svg)"
        replace_block(Path("README.md"), f"{plot}\n\n{short.markdown()}", "islands")
    if rare:
        parts.append(rare_table(rare, curves))
    if nodes:
        parts.append("# Two nodes of two ranks\n")
        parts.append(steps_table(nodes))
        if four:
            parts += [*what_to_use(four, nodes, curves), times_table(four, nodes)]
    parts.append("# Quality, whatever the link\n")
    # those that share the runs of others have their losses
    trained_curves = {name: curve for name, curve in curves.items() if curve.trained_as == name}
    parts += [tuning_table(curves), quality_table(trained_curves)]
    parts += [lengths_table(trained_curves), codecs_table(trained_curves)]
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
