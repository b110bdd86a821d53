"""Tables and plot of `benchmarks.islands`, from the records that are there.

Time to a loss is steps to it times the mean step. Steps: each method is trained with several
lengths, each with its own end of the learning rate; the length that ends at the loss of 2,000
steps of stock torch is interpolated in log steps for the first seed. With the other seeds each
method is trained with one length: what its loss differs by moves the length along the same slope.
Ratios have 95 % intervals, of the seeds and of the repetitions of the timing together; ratios of
one seed have none.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common import publish, text_table
from benchmarks.islands import (
    FOLDER,
    LINKS,
    METHODS,
    STOCK,
    TARGET,
    TARGET_STEPS,
    parameters,
    sync_of,
    timed_as,
    timings,
    timing_path,
)
from shardlab.config.strategy import Strategy, parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, read_timings
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.core.interval import Ratio, interval_factor
from shardlab.report import plots
from shardlab.report.tables import ABSENT, Table, figure, percent, within

_ALONE = "one-device"
_WARM_STEP = "ddp-int4"
"""method whose step is that of a warm-up"""
_FAMILIES = {
    "one device": (_ALONE,),
    "stock torch": tuple(name for name in METHODS if name.startswith(TARGET)),
    "compressed steps": tuple(name for name in METHODS if name.startswith(("ddp-", "manual-"))),
    "rare exchanges": tuple(name for name in METHODS if sync_of(name) is not None),
}


class Mean(NamedTuple):
    """Mean of logarithms and half its interval; NaN for one value."""

    log: float
    half: float

    def over(self, other: "Mean") -> "Mean":
        """Return the ratio of two independent means."""
        return Mean(self.log - other.log, math.hypot(self.half, other.half))

    @property
    def ratio(self) -> Ratio:
        """The mean as a factor."""
        ends = math.exp(self.log - self.half), math.exp(self.log + self.half)
        return Ratio(math.exp(self.log), *ends)


def mean_of(logs: Sequence[float]) -> Mean:
    """Return the mean with Student's interval."""
    deviation = float(np.std(logs, ddof=1)) if len(logs) > 1 else math.nan
    return Mean(float(np.mean(logs)), interval_factor(len(logs)) * deviation)


class Length(NamedTuple):
    """Logarithm of the steps of the run that would end at a loss, and of it per nat."""

    log: float
    per_nat: float


def length_at(loss: float, losses: Mapping[int, float]) -> Length | None:
    """Return the length of the run that would end at a loss, by those of runs of several lengths.

    Returns:
        None where no two neighbours have it between them.
    """
    for (steps, above), (more, below) in itertools.pairwise(sorted(losses.items())):
        if above >= loss >= below and above > below:
            per_nat = math.log(more / steps) / (above - below)
            return Length(math.log(steps) + (above - loss) * per_nat, per_nat)
    return None


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


def records_of(name: str) -> list[dict[str, Any]]:
    """Return the records of the runs of a method.

    Raises:
        UserError: one has another strategy than params/islands.yaml.
    """
    strategy: Strategy = parameters()(f"strategies.{METHODS[name].strategy}")
    records = []
    for path in sorted((FOLDER / "runs" / name).glob("*.json")):
        records.append(read_json(path, "remove it"))
        if parse_strategy(records[-1]["strategy"]).hash() != strategy.hash():
            raise UserError(f"{path}: of another strategy than params/islands.yaml: train again")
    return records


class Curve:
    """Losses of a method by steps and seed, at its tuned learning rate."""

    def __init__(self, name: str) -> None:
        self.name, self.method = name, METHODS[name]
        tuned = records_of(self.method.tuned_as or name)
        self.tuning = {
            record["learning_rate"]: record["val_loss"]
            for record in tuned
            if (record["steps"], record["seed"]) == (self.method.steps, 0)
        }
        """losses of the first seed by the learning rates that were tried"""
        self.rate = min(self.tuning, key=self.tuning.__getitem__)
        self.records: dict[int, dict[int, dict[str, Any]]] = {}
        for record in records_of(name):
            if record["learning_rate"] == self.rate:
                self.records.setdefault(record["seed"], {})[record["steps"]] = record

    def loss(self, seed: int, steps: int) -> float | None:
        """Return the validation loss of a run; None where it was not trained."""
        record = self.records.get(seed, {}).get(steps)
        return None if record is None else record["val_loss"]

    def mean_bytes(self) -> float:
        """Return the bytes that a rank sends in a step, on average over the runs."""
        return float(
            np.mean([r["bytes_wire"] for at in self.records.values() for r in at.values()])
        )

    def mean_steps_to(self, target: "Curve") -> Mean | None:
        """Return the mean steps to the target's loss, seed by seed; None where no seed has any."""
        first, steps = 0, self.method.steps
        reached, loss = target.loss(first, TARGET_STEPS), self.loss(first, steps)
        if reached is None or loss is None:
            return None
        losses = {steps: record["val_loss"] for steps, record in self.records[first].items()}
        length = length_at(reached, losses)
        if length is None:
            return None
        logs = []
        for seed in self.records:
            other, own = target.loss(seed, TARGET_STEPS), self.loss(seed, steps)
            if other is not None and own is not None:
                worse = (own - other) - (loss - reached)
                logs.append(length.log + worse * length.per_nat)
        return mean_of(logs)

    def perplexity_over(self, target: "Curve") -> Ratio | None:
        """Return the perplexity after the target's tokens over the target's; None if unknown."""
        method, reference = self.method, target.method
        tokens = reference.world_size * reference.accumulation * TARGET_STEPS
        steps = tokens // (method.world_size * method.accumulation)
        logs = [
            mine - other
            for seed in self.records
            if (mine := self.loss(seed, steps)) is not None
            and (other := target.loss(seed, TARGET_STEPS)) is not None
        ]
        return mean_of(logs).ratio if logs else None


class LinkTimes:
    """Step times on one link, ms, repetition by repetition."""

    def __init__(self, rate: str | None) -> None:
        self.name = rate or "loopback"
        runs = read_timings(timing_path(rate), "python -m benchmarks.islands time")
        self._runs = {(run.timing, run.run): run for run in runs}
        self.compute = self.step(NO_COMMUNICATION, 1)
        self.ratio = self.step(STOCK[0], 1).over(self.compute).ratio.ratio - 1
        """synchronisation of stock FSDP2 over computation"""

    def step(self, strategy: str, accumulation: int) -> Mean:
        """Return the mean step, ms."""
        names = [each.name for each in timings(parameters()) if each.accumulation == accumulation]
        run = next(run for name in names if (run := self._runs.get((name, strategy))))
        logs = np.log(run.measured_ms())
        return mean_of(logs[np.isfinite(logs)])  # not finite where the machine paused

    def of(self, row: "Row") -> Mean:
        """Return the mean step of a method that trains until the loss, ms."""
        method = METHODS[row.name]
        if method.world_size == 1:
            return self.compute
        later = self.step(row.engine or timed_as(method.strategy), method.accumulation)
        sync = sync_of(row.name)
        if sync is None or not sync.warmup_steps:
            return later
        first, steps = self.step(_WARM_STEP, 1), row.steps.ratio.ratio
        warm = sync.warmup_steps / steps * math.exp(first.log)
        rest = (1 - sync.warmup_steps / steps) * math.exp(later.log)
        half = math.hypot(warm * first.half, rest * later.half) / (warm + rest)
        return Mean(math.log(warm + rest), half)

    def seconds(self, row: "Row") -> float:
        """Return the mean seconds to the loss."""
        return math.exp(row.steps.log + self.of(row).log) / 1e3

    def gain(self, row: "Row", other: "Row") -> Ratio:
        """Return the time to the loss of another method over that of a method."""
        step, steps = self.of(other).over(self.of(row)), other.steps.over(row.steps)
        return Mean(step.log + steps.log, math.hypot(step.half, steps.half)).ratio


class Row(NamedTuple):
    """A method that reaches the loss, with the engine that would run it."""

    name: str
    engine: str | None
    steps: Mean

    @property
    def title(self) -> str:
        """Name in tables."""
        if self.engine is None:
            return self.name
        return self.name.replace(TARGET, self.engine)


def rows_of(curves: Mapping[str, Curve]) -> list[Row]:
    """Return the methods that reach the loss; stock ones with each engine of torch."""
    rows = []
    for name, curve in curves.items():
        steps = curve.mean_steps_to(curves[TARGET])
        if steps is not None:
            engines = STOCK if name.startswith(TARGET) else (None,)
            rows += [Row(name, engine, steps) for engine in engines]
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
        steps, over = curve.mean_steps_to(target), curve.perplexity_over(target)
        rows.append(
            [
                name,
                str(len(curve.records)),
                f"{curve.rate:g}",
                shown,
                ABSENT if steps is None else within(*steps.ratio, 0),
                ABSENT if over is None else within(*over, 3),
                figure(curve.mean_bytes() / 1e3),
            ]
        )
    headings = (
        *("method", "seeds", "learning rate", "validation loss by steps"),
        *("steps to the loss", "perplexity after equal tokens", "kB per step and rank"),
    )
    return text_table("Quality", headings, rows)


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
    return METHODS[row.name].accumulation * link.compute.over(link.of(row)).ratio.ratio


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
        plain = next((row for row in rows if row.title == STOCK[0]), None)
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
        *("over stock FSDP2", "perplexity after equal tokens"),
    )
    return text_table("What to use", headings, cells)


def _gain(link: LinkTimes, best: Row, other: Row | None) -> str:
    if other is None or other == best:
        return ABSENT
    return f"{within(*link.gain(best, other), 2)} of {other.title}"


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


def gain_plot(rows: Sequence[Row], links: Sequence[LinkTimes]) -> Figure:
    """Plot the gain over one device by the ratio of synchronisation to computation."""
    alone = next(row for row in rows if row.name == _ALONE)
    ordered = sorted(links, key=lambda link: link.ratio)
    drawing = Figure((plots.WIDTH, 3.4))
    axes = drawing.subplots()
    for number, (family, names) in enumerate(_FAMILIES.items()):
        best = [fastest(rows, names, link) for link in ordered]
        gains = [
            (link.ratio, link.gain(row, alone))
            for link, row in zip(ordered, best, strict=True)
            if row
        ]
        if not gains:
            continue
        x, y = [at for at, _ in gains], [gain.ratio for _, gain in gains]
        colour = plots.BASELINE_COLOUR if family == "one device" else plots.COLOURS[number - 1]
        axes.plot(x, y, label=family, color=colour, marker=plots.MARKERS[number])
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("synchronisation of stock FSDP2 / computation")
    axes.set_ylabel("gain over one device, time to the loss")
    axes.legend()
    return drawing


def main() -> None:
    """Write islands_report.md and gain.svg of the experiment."""
    curves = {name: Curve(name) for name in METHODS if (FOLDER / "runs" / name).is_dir()}
    if TARGET not in curves:
        raise UserError(f"{FOLDER}: no run of {TARGET} yet: run python -m benchmarks.islands")
    links = [LinkTimes(rate) for rate in LINKS if timing_path(rate).is_file()]
    rows = rows_of(curves)
    publish(
        __doc__,
        FOLDER / "islands_report.md",
        lookup_table(rows, links, curves),
        pays_table(rows, links),
        times_table(rows, links),
        quality_table(curves),
    )
    if links:
        plots.save(gain_plot(rows, links), FOLDER / "gain.svg", "svg")


if __name__ == "__main__":
    main()
