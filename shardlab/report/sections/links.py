"""Section on links: the fastest run at each rate, and the break-even rate of each codec.

A codec pays while the step is shorter than that of the same strategy without a codec. The rate at
which it stops to pay is interpolated between two measured rates: logarithm of the ratio of step
times over logarithm of the rate.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from shardlab.config.strategy import Strategy
from shardlab.report.evidence import Evidence
from shardlab.report.plots import crossover_plot
from shardlab.report.sections.quality import quality_tables
from shardlab.report.sections.scaling import TIMED
from shardlab.report.tables import (
    ABSENT,
    RUN,
    Cell,
    Column,
    Figure,
    Row,
    Section,
    Table,
    figure,
    make_table,
    plus_minus,
    rate_text,
    ratio,
    words,
)
from shardlab.report.timings import Crossover, LinkTiming, speed_up, step_sd


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
