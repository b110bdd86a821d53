"""Section on links: the fastest run at each rate, and the break-even rate of each codec.

A codec pays while the step is shorter than that of the same strategy without a codec. The rate at
which it stops to pay is interpolated between two measured rates: logarithm of the ratio of step
times over logarithm of the rate.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardlab.collection.quality import quality_at_time, steps_to_quality
from shardlab.report.aggregate import mean_over_seeds
from shardlab.report.evidence import Evidence
from shardlab.report.numbers import (
    ABSENT,
    Cell,
    Row,
    figure,
    plus_minus,
    rate_text,
    ratio,
    words,
)
from shardlab.report.sections.scaling import TIMED
from shardlab.report.tables import RUN, Column, Figure, Section, Table, by_run, make_table
from shardlab.report.timing_plots import crossover_plot
from shardlab.report.timings import Crossover, LinkTiming, speed_up, step_sd
from shardlab.strategy.strategy import Strategy


def links(evidence: Evidence) -> Section:
    """Show speed-ups by link rate, break-even rates of codecs, and time to quality by link."""
    baseline = evidence.baseline
    everything = evidence.timing_table("All timings", TIMED, evidence.timing_rows)
    return Section(
        "Which codec for which link?",
        sentences=[
            "A codec pays while a step is shorter than that of the same strategy without a codec. "
            "The rate at which it stops paying is interpolated between measured rates on "
            "logarithmic scales; its interval is that of the ratios of step times. Time to a loss "
            "is the number of steps times the step time, with the smoothed losses of the training "
            "runs; a run that is over keeps its last loss.",
        ],
        figures=[
            Figure(
                "crossover",
                "Speed-up over the baseline at the same link rate, with its 95 % confidence "
                "interval over repetitions. The dotted line is the no-communication bound.",
                crossover_plot(
                    evidence.crossovers, evidence.timing_rows["run"], evidence.runs, baseline
                ),
            )
        ],
        sections=[
            Section(
                title=f"Links of {group.title}",
                sentences=[fastest(group, baseline)],
                tables=_tables(group, evidence),
            )
            for group in evidence.crossovers
        ],
        details=[Section(everything.title, tables=[everything])],
    )


def _tables(group: Crossover, evidence: Evidence) -> list[Table]:
    codecs = codec_table(group)
    # losses of the training runs hold for their number of ranks alone
    trained = group.world_size == evidence.records[0].world_size
    return [
        step_table(group, evidence.baseline),
        *([codecs] if codecs.rows else []),
        *(quality_tables(group, evidence) if trained else []),
    ]


def references(group: Crossover) -> dict[str, str]:
    """Return for every run with a codec the run to beat: the same strategy without a codec.

    An all-to-all route is preferred: gloo's reduce-scatter sends twice the bytes, and beating it is
    no merit of a codec. Runs without a counterpart are left out.
    """
    strategies = group.strategies()
    without = sorted(
        (run for run, strategy in strategies.items() if _uncompressed(strategy)),
        key=lambda run: strategies[run].gradients.route != "exchange",
    )
    found = {}
    for run, strategy in strategies.items():
        same = [other for other in without if _rest(strategies[other]) == _rest(strategy)]
        if not _uncompressed(strategy) and same:
            found[run] = same[0]
    return found


def _uncompressed(strategy: Strategy) -> bool:
    weights = strategy.weights
    return strategy.gradients.plain() and (weights is None or weights.codec.name == "none")


def _rest(strategy: Strategy) -> dict[str, Any]:
    """Return the strategy without its codecs and routes."""
    return strategy.model_dump(mode="json", exclude={"gradients", "weights"})


def crossing(curve: Sequence[tuple[float, float]]) -> float:
    """Return the rate at which a ratio of step times reaches 1, from lower rates.

    Args:
        curve: rates in bits per second, ascending, each with the ratio there.

    Returns:
        0 below all of them, infinity above.
    """
    if curve[-1][1] < 1:
        return math.inf
    for (rate, before), (next_rate, after) in reversed([*pairwise(curve)]):
        if before < 1:
            fraction = math.log(before) / (math.log(before) - math.log(after))
            return float(rate * (next_rate / rate) ** fraction)
    return 0.0


def stops_paying(group: Crossover, run: str, reference: str) -> str:
    """Return the break-even rate of a codec with its interval, as text."""
    at = [(t.bits_per_second, t.ratio(run, reference)) for t in group.measured]
    known = [(rate, found) for rate, found in at if math.isfinite(found["mean"])]
    if not known:
        return ABSENT
    lowest, highest = known[0][0], known[-1][0]

    def text_of(key: str) -> str:
        rate = crossing([(rate, float(found[key])) for rate, found in known])
        if rate == 0:
            return f"below {rate_text(lowest)}"
        return f"above {rate_text(highest)}" if math.isinf(rate) else rate_text(rate)

    text = text_of("mean")
    if not all(math.isfinite(found["low"]) for _, found in known):
        return text
    # the upper end of the ratio gives the lower end of the rate
    ends = text_of("high"), text_of("low")
    return text if ends == (text, text) else f"{text} ({ends[0]} to {ends[1]})"


def fastest(group: Crossover, baseline: str) -> str:
    """Return a sentence that names the run with the shortest step on each link."""
    parts = []
    for timing in group.timings:
        best = timing.fastest()
        gain = 1 / timing.ratio(best, baseline)["mean"]
        other = best != baseline and math.isfinite(gain)
        than = f", {figure(gain)} times as fast as {baseline}" if other else ""
        parts.append(f"{timing.link}: {best} ({figure(timing.step_ms(best))} ms{than})")
    return f"Shortest step on {group.title}, by link: {'; '.join(parts)}."


def step_table(group: Crossover, baseline: str) -> Table:
    """Return the step time of every run on every link, and its ratio to the baseline."""
    columns = [RUN]
    for timing in group.timings:
        columns += [
            Column(timing.link, "ms", _step(timing), ""),
            Column("/ baseline", timing.link, _step_ratio(timing, baseline), ""),
        ]
    rows: list[Row] = [{"run": run} for run in group.runs]
    return make_table(f"Step time by link, {group.title}", columns, rows, baseline)


def _step(timing: LinkTiming) -> Cell:
    def cell(row: Row) -> str:
        run = timing.runs.get(row["run"])
        return ABSENT if run is None else plus_minus(timing.step_ms(run.run), step_sd(run))

    return cell


def _step_ratio(timing: LinkTiming, baseline: str) -> Cell:
    return lambda row: ratio(*timing.ratio(row["run"], baseline), places=3)


def _speed_up(timing: LinkTiming) -> Cell:
    return lambda row: ratio(*speed_up(timing.ratio(row["run"], row["reference"])), places=2)


def codec_table(group: Crossover) -> Table:
    """Return the speed-up of each codec on each link, and its break-even rate."""
    rows: list[Row] = [
        {"run": run, "reference": reference, "stop": stops_paying(group, run, reference)}
        for run, reference in references(group).items()
    ]
    columns = [
        RUN,
        Column("relative to", "", words("reference"), "", False),
        *(Column("speed-up", timing.link, _speed_up(timing), "") for timing in group.timings),
        Column("stops paying at", "", words("stop"), "", False),
    ]
    return make_table(f"Where codecs stop paying, {group.title}", columns, rows)


Curves = Mapping[str, list[list[float]]]
"""losses by run and seed"""


def quality_tables(group: Crossover, evidence: Evidence) -> list[Table]:
    """Return time to each loss and loss after each time that the parameters ask for.

    A link changes the time of a step and not its loss: losses are those of the training runs, times
    those of the timings. Means over seeds; absent if a seed does not reach the loss.
    """
    curves = {
        run: [[seed[step] for step in sorted(seed)] for seed in evidence.losses[run].values()]
        for run in group.runs
        if run in evidence.losses
    }
    titles = {
        "Time to a training loss": _times(group, curves, evidence.quality.train_loss),
        "Training loss at equal time": _losses(group, curves, evidence.quality.time_s),
    }
    rows: list[Row] = [{"run": run} for run in curves]
    return [
        make_table(f"{title}, {group.title}", [RUN, *columns], rows, evidence.baseline)
        for title, columns in titles.items()
        if curves and columns
    ]


def _times(group: Crossover, curves: Curves, wanted: Sequence[float]) -> list[Column]:
    columns = []
    for loss in wanted:
        title = f"loss {loss:g}"
        steps = {
            run: mean_over_seeds([steps_to_quality(seed, loss) for seed in seeds])
            for run, seeds in curves.items()
        }
        columns.append(by_run(title, "steps", steps))
        for timing in group.timings:
            seconds = {run: count * timing.step_ms(run) / 1e3 for run, count in steps.items()}
            columns.append(by_run(title, f"s, {timing.link}", seconds))
    return columns


def _losses(group: Crossover, curves: Curves, wanted: Sequence[float]) -> list[Column]:
    columns = []
    for seconds in wanted:
        for timing in group.timings:
            losses = {
                run: mean_over_seeds([_loss_after(s, timing.step_ms(run), seconds) for s in seeds])
                for run, seeds in curves.items()
            }
            columns.append(by_run(f"after {seconds:g} s", timing.link, losses))
    return columns


def _loss_after(losses: list[float], step_ms: float, seconds: float) -> float | None:
    if math.isnan(step_ms):
        return None
    times = [(step + 1) * step_ms / 1e3 for step in range(len(losses))]
    return quality_at_time(losses, times, seconds)
