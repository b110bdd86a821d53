"""Section on the time to one loss: what to use on each link, and what was tuned."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from shardlab.core.numbers import ABSENT, figure, within
from shardlab.report.evidence import Evidence
from shardlab.report.loss_plots import bytes_plot, gain_plot
from shardlab.report.loss_times import (
    FAMILIES,
    ONE_DEVICE,
    Comparison,
    LinkTimes,
    Way,
    ways_of,
)
from shardlab.report.tables import Figure, Section, Table, make_table
from shardlab.report.tuned import Curve, Tuned
from shardlab.results.interval import Ratio, geometric_mean

_LISTED, _LESS = "listed only", "tuned over less"
_BY_LENGTH = "Perplexity after equal tokens, by length"


def time_to_loss(evidence: Evidence) -> Section | None:
    """Show what reaches the loss first on each link, and the losses behind it; None where nothing
    was tuned."""
    tuned = evidence.tuned
    if tuned is None:
        return None
    compared, ways = evidence.by_loss, ways_of(tuned)
    links = [comparison.link for comparison in compared]
    figures = [
        Figure(
            "gain",
            "How many times as soon the best of each kind reaches the loss as one device, by the "
            "time of synchronisation over that of computation; bars are 95 % intervals.",
            gain_plot(compared),
        ),
        Figure(
            "bytes",
            "Perplexity over that of the stock method after equal tokens, by what a rank sends.",
            bytes_plot(ways, tuned),
        ),
    ]
    tables = [use_table(compared, tuned), times_table(ways, links), tuning_table(tuned)]
    return Section(
        "Time to one loss",
        sentences=_sentences(tuned),
        figures=figures,
        tables=[*tables, lengths_table(tuned)],
        notes=[*_unknown(ways, links)],
    )


def _sentences(tuned: Tuned) -> list[str]:
    return [
        f"The loss is {tuned.tune.target_loss:g} nats per token on the validation split. "
        "NAME/M is a strategy with M micro-batches per step, of all ranks together; one device has "
        "them all. The time is steps to the loss times the mean step of a timing. Steps are "
        "interpolated in log steps between two lengths of the first seed, each with its own end of "
        "the learning rate; other seeds move them along the same slope.",
        "Methods compete that were tuned over the same learning rates and betas with as many "
        f"tries at most; others are {_LISTED}. With fewer numbers of micro-batches a method can "
        f"only look slower than it is: a gain over it is marked {_LESS!r}. Brackets hold 95 % "
        "intervals of the seeds and of the repetitions of one timing together; one seed has none. "
        "They do not hold the choice of settings by the same runs, nor what another sitting would "
        "show.",
    ]


def not_reached(tuned: Tuned | None) -> list[str]:
    """Return a sentence where no run reaches the loss, or some too soon to be compared."""
    if tuned is None:
        return []
    if tuned.reached:
        soon = [f"{c.name}/{c.micro_batches}" for c in tuned.curves if c.competes and c.too_soon]
        return [
            f"{name} has tune.target_loss in its shortest run, and may be sooner at it than all "
            "that is compared: lower tune.target_loss, or raise tune.lengths."
            for name in soon
        ]
    losses = [
        (loss, curve.name)
        for curve in tuned.curves
        for seed in curve.runs
        for loss in curve.losses(seed).values()
    ]
    best = "no run has a finite loss"
    if losses:
        best = "the lowest is {:.4g}, of {}, the highest {:.4g}, of {}".format(
            *min(losses), *max(losses)
        )
    return [
        f"No method has tune.target_loss ({tuned.tune.target_loss:g}) between two of its lengths, "
        f"so that nothing is compared by the time to it: {best}."
    ]


def use_table(compared: list[Comparison], tuned: Tuned) -> Table:
    """Return what to use on each link, with its gain over the best of each other kind."""
    rows = []
    for comparison in compared:
        best, gains = comparison.order[0], comparison.gains()
        same = [way.title for way in comparison.same_as(best)]
        rows.append(
            [
                ratio_text(comparison.link),
                comparison.link.name,
                best.title,
                *(
                    _over(*gains[family], same) if family in gains else ABSENT
                    for family in FAMILIES
                ),
                _ratio(tuned.perplexity(best.curve)),
                ", ".join(same) or ABSENT,
            ]
        )
    headings = (
        *("synchronisation / computation", "link", "use"),
        *(f"gain over {family}" for family in FAMILIES),
        *("perplexity after equal tokens", "not told apart from it"),
    )
    return make_table("What to use", headings, rows, layout="text")


def times_table(ways: list[Way], links: list[LinkTimes]) -> Table:
    """Return the minutes to the loss on each link."""
    rows = [
        [
            way.title,
            way.family,
            *(figure(link.seconds(way) / 60) if link.has(way) else ABSENT for link in links),
            _compared(way.curve),
        ]
        for way in ways
        if way.curve.steps and any(link.has(way) for link in links)
    ]
    headings = ("option", "kind", *(link.name for link in links), "compared")
    return make_table("Minutes to the loss", headings, rows, layout="text")


def _unknown(ways: list[Way], links: list[LinkTimes]) -> Iterator[str]:
    """Yield what has no time, and why."""
    ways = [way for way in ways if way.curve.steps]
    untimed = [way.title for way in ways if not any(link.has(way) for link in links)]
    if ways and not any(way.curve.competes for way in ways):
        yield (
            "No time to the loss is compared: each method that reaches it is tuned over less than "
            "tune says."
        )
    elif not links and ways:
        yield (
            "No time to the loss is known: no timing has the baseline, steps without communication "
            "and a method that reaches the loss, on several ranks."
        )
    if links and untimed:
        yield f"Not timed, so that they have no time to the loss: {', '.join(untimed)}."
    for link in links:
        titles = [w.title for w in ways if w.title not in untimed and not link.has(w)]
        if titles:
            yield f"Not timed on {link.name}: {', '.join(titles)}."


def tuning_table(tuned: Tuned) -> Table:
    """Return what each method was tuned over, its losses by steps, and its steps to the loss."""
    rows = [_tuning(curve, tuned) for curve in tuned.listed]
    headings = (
        *("method", "learning rates tried", "betas tried", "tries", "best", "left open", "seeds"),
        *("validation loss by steps", "steps to the loss", "perplexity after equal tokens"),
        *("kB per step and rank", "compared"),
    )
    return make_table("Losses and steps", headings, rows, layout="text")


def _tuning(curve: Curve, tuned: Tuned) -> list[str]:
    rates = sorted({rate for rate, _ in curve.tries})
    betas = sorted({decays for _, decays in curve.tries})
    lengths = sorted({steps for runs in curve.runs.values() for steps in runs})
    shown = []
    for steps in lengths:
        losses = [curve.losses(seed)[steps] for seed in curve.runs if steps in curve.losses(seed)]
        shown.append(f"{steps:,}: {figure(float(np.mean(losses)), 4) if losses else 'diverged'}")
    best = ABSENT if curve.best is None else f"{curve.best[0]:g}, {_betas(curve.best[1])}"
    return [
        f"{curve.name}/{curve.micro_batches}",
        ", ".join(f"{rate:g}" for rate in rates) or ABSENT,
        ", ".join(map(_betas, betas)) or ABSENT,
        str(len(curve.tries)),
        best,
        "; ".join(curve.unbracketed) or ABSENT,
        str(len(curve.runs)),
        ", ".join(shown) or ABSENT,
        _steps(curve),
        _ratio(tuned.perplexity(curve)),
        figure(curve.mean_bytes() / 1e3),
        _compared(curve),
    ]


def _steps(curve: Curve) -> str:
    """Format the steps to the loss, or say why there are none."""
    if curve.steps:
        return within(*geometric_mean([*curve.steps.values()]), 0)
    lengths = len(curve.runs.get(curve.first_seed, ()))
    if lengths < 2:
        return "one length alone" if lengths else ABSENT
    return "reached in the shortest" if curve.too_soon else "not reached"


def lengths_table(tuned: Tuned) -> Table:
    """Return the perplexity over that of the stock method at equal tokens, by the length of its
    run."""
    stock, rows = tuned.stock, []
    if stock is None:
        return make_table(_BY_LENGTH, ["method"], [])
    lengths = sorted(stock.losses(stock.first_seed))
    for curve in tuned.listed:
        over = [curve.perplexity_over(stock, steps) for steps in lengths]
        if curve is not stock and any(over):
            rows.append([f"{curve.name}/{curve.micro_batches}", *map(_ratio, over)])
    headings = ("method", *(f"after {steps:,} steps of {stock.name}" for steps in lengths))
    return make_table(_BY_LENGTH, headings, rows, layout="text")


def use_line(comparison: Comparison) -> str:
    """Return a sentence on a link: what to use, and its gain over one device."""
    best, gains, gain = comparison.order[0], comparison.gains(), ""
    if ONE_DEVICE in gains:
        gain = f", {within(*gains[ONE_DEVICE][0], 2)} times as soon at the loss as one device"
    if same := comparison.same_as(best):
        gain += f". Not told apart from it: {', '.join(way.title for way in same)}"
    link = comparison.link
    return f"{link.name}, synchronisation / computation {ratio_text(link)}: use {best.title}{gain}."


def ratio_text(link: LinkTimes) -> str:
    """Format the ratio of synchronisation to computation on a link."""
    assert link.stock_over_bound is not None, "links without the baseline are left out"
    ratio, low, high = (figure(end - 1, 2) for end in link.stock_over_bound)
    return ratio if math.isnan(link.stock_over_bound.low) else f"{ratio} ({low} to {high})"


def _betas(betas: tuple[float, ...]) -> str:
    return "/".join(f"{beta:g}" for beta in betas)


def _ratio(over: Ratio | None) -> str:
    return ABSENT if over is None else within(*over, 3)


def _over(gain: Ratio, way: Way, same: Sequence[str]) -> str:
    """Format a gain over a way, and say so where it is one of those that are not told apart, and
    where it was tuned over less."""
    notes = ["not told apart"] * (way.title in same) + [_LESS] * bool(way.curve.less)
    return f"{within(*gain, 2)} {way.title}" + f": {', '.join(notes)}" * bool(notes)


def _compared(curve: Curve) -> str:
    """Return what a method was tuned over less of, and whether it is listed only."""
    if not curve.less:
        return ABSENT
    return f"{_LESS if curve.competes else _LISTED}: {', '.join(curve.less)}"
