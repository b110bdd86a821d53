"""Ranking of all strategies that a search has raced, as plain text of at most 100 columns."""

import statistics
from collections.abc import Iterable, Sequence
from textwrap import wrap
from typing import NamedTuple

from shardlab.config.timing_record import TimedRun
from shardlab.search.history import History, Measured
from shardlab.search.rounds import Outcome, StepRatio

_ABSENT = "-"
_COLUMNS = 100
_HEADINGS = ("  strategy", "step, ms", "of the start's step", "perplexity", "predicted", "from")


class Ranked(NamedTuple):
    """A strategy that was raced, timed, or failed in a race."""

    label: str
    held: bool
    outcome: Outcome
    step_ms: float | None
    """median, where it was timed last; None: it failed before"""
    step: StepRatio | None
    """over the start's"""
    perplexity_ratio: float | None
    """over the start's; None: it was not measured"""
    predicted_ms: float | None
    """before its first race"""
    source: str
    """of the step: `timing NAME` or `round K`; of the failure"""


def ranking(history: History, timed: Iterable[TimedRun]) -> list[Ranked]:
    """Return what was raced or timed on the link of the search, the shortest step first.

    Ratios to the start rank, since a machine is not equally fast in all races. What failed comes
    last.

    Args:
        timed: runs of the timings.
    """
    # a race is named `round-1`, its source `round 1`
    runs = [(race.name.replace("-", " "), run) for race in history.races for run in race.runs]
    runs += [(f"timing {run.timing}", run) for run in timed]
    steps = {(source, run.strategy_hash): statistics.median(run.step_ms) for source, run in runs}
    predicted: dict[str, float] = {}
    for entry in history.rounds:
        for each in entry.compared:
            if each.predicted_ms is not None:
                predicted.setdefault(each.hash, each.predicted_ms)

    def ranked(entry: Measured) -> Ranked:
        step = entry.steps[-1] if entry.steps else None
        source = step.source if step else entry.source
        quality = history.quality(entry.strategy)
        return Ranked(
            label=entry.strategy.label(),
            held=entry.hash == history.incumbent,
            outcome=entry.outcome,
            step_ms=steps.get((source, entry.hash)),
            step=step,
            perplexity_ratio=quality.ratio if quality and quality.sure else None,
            predicted_ms=predicted.get(entry.hash),
            source=source,
        )

    known = [entry for entry in history.measured.values() if entry.steps or entry.outcome != "ok"]
    return sorted(map(ranked, known), key=_by_step)


def _by_step(each: Ranked) -> tuple[bool, float, str]:
    failed = each.outcome != "ok" or each.step is None
    return failed, each.step.ratio if each.step else 0.0, each.label


def ranking_text(ranked: Sequence[Ranked]) -> str:
    """Return a table with a line for each strategy, or several where its label is long."""
    rows = [_HEADINGS, *map(_cells, ranked)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[0] = min(widths[0], _COLUMNS - sum(2 + width for width in widths[1:]))
    lines = []
    for label, *middle, source in rows:
        # the mark of the one that is held stays in front
        mark, words = label[:2], wrap(label[2:], widths[0] - 2)
        cells = [each.rjust(width) for each, width in zip(middle, widths[1:], strict=False)]
        lines.append("  ".join([f"{mark}{words[0]}".ljust(widths[0]), *cells, source]))
        lines += [f"  {more}" for more in words[1:]]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _cells(each: Ranked) -> tuple[str, ...]:
    step = each.step
    ratio = _ABSENT if step is None else f"{step.ratio:.3f} ({step.low:.3f} to {step.high:.3f})"
    if step is not None and step.low == step.high == 1:
        ratio = "1"
    return (
        f"{'* ' if each.held else '  '}{each.label}",
        _number(each.step_ms, 1),
        ratio if each.outcome == "ok" else each.outcome,
        _number(each.perplexity_ratio, 3),
        _number(each.predicted_ms, 1),
        each.source,
    )


def _number(value: float | None, places: int) -> str:
    return _ABSENT if value is None else f"{value:.{places}f}"
