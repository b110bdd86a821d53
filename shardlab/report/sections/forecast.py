"""Section on the forecast: validation errors, and predictions for clusters."""

from collections.abc import Iterable, Sequence

from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.core.document import Document
from shardlab.forecast.extrapolation import Point
from shardlab.forecast.results import ForecastDocument
from shardlab.report.evidence import Evidence
from shardlab.report.plots import forecast_plot
from shardlab.report.sections.scaling import LINK, RANKS
from shardlab.report.tables import (
    RUN,
    Column,
    Figure,
    Row,
    Section,
    Table,
    fixed,
    make_table,
    percent,
    plain,
    plural,
    rate_text,
    share,
    within,
    words,
)

_MEDIAN_GOAL, _WORST_GOAL = 0.05, 0.15


def _predicted(row: Row) -> str:
    return within(row["predicted_ms"], row["low_ms"], row["high_ms"], 1)


def _pays_up_to(row: Row) -> str:
    if row["step"] is None:
        return "every rate" if row["always"] else "none"
    return rate_text(row["step"])


CHECKS = [
    RUN,
    RANKS,
    LINK,
    Column(
        "predicted step",
        "ms",
        _predicted,
        "step time that the model predicts, with its 95 % prediction interval: covariances of the "
        "fits plus unexplained variance",
    ),
    Column(
        "measured step",
        "ms",
        lambda row: fixed(row["measured_ms"], 1),
        "median over the repetitions of a timing that the model was not fitted on",
    ),
    Column("error", "%", share("error"), "predicted over measured step, minus 1"),
    Column(
        "error, own compute",
        "%",
        share("error_of_communication"),
        "the same with the no-communication bound of that very timing, which removes the drift of "
        "the machine",
    ),
]

BREAK_EVEN = [
    RUN,
    Column("codecs", "", words("codec"), "codecs of gradients, and of weights", False),
    Column("payload / raw", "", plain("ratio"), "payload bytes over raw bytes"),
    Column(
        "exposed collective",
        "up to",
        lambda row: rate_text(row["exposed"]),
        "link rate up to which the codec shortens a fully exposed reduction",
    ),
    Column(
        "whole step",
        "up to",
        _pays_up_to,
        "link rate up to which the codecs shorten the simulated step, relative to the same "
        "strategy without codecs",
    ),
]

PRESET = Column("preset", "", words("link"), "assumed cluster", False)


def forecast(evidence: Evidence) -> Section:
    """Show the errors on held-out timings, and predictions with their assumptions."""
    predicted = evidence.predicted
    held_out = [each for each in predicted.checks if each.held_out]
    largest_first = sorted(held_out, key=lambda each: -abs(each.error))
    return Section(
        "Forecast",
        sentences=[accuracy(predicted)],
        items=[
            *(f"Not predicted: {run}, {why}." for run, why in predicted.left_out.items()),
            *(f"Warning: {warning}." for warning in predicted.warnings),
        ],
        figures=[
            Figure(
                "forecast",
                "Predicted throughput of a rank relative to one without communication, with the "
                "95 % confidence interval of the fits; every rank computes as on this machine. "
                "Above 100 %: with sharding a rank updates only its shard of the parameters.",
                forecast_plot(predicted.points, evidence.runs, evidence.baseline),
            )
        ],
        tables=[_table("Validation on held-out timings", CHECKS, largest_first)],
        sections=[
            Section(
                "Assumptions",
                items=[
                    *predicted.assumptions,
                    *(f"{name}: {source}." for name, source in predicted.links.items()),
                ],
            ),
            *_break_even(predicted),
        ],
        details=[Section("Predicted throughput", tables=[_scaling(predicted.points)])],
    )


def _break_even(predicted: ForecastDocument) -> list[Section]:
    if not predicted.break_even:
        return []
    table = _table("Predicted break-even rates", BREAK_EVEN, predicted.break_even)
    sentence = "For two ranks, each with cores that no other rank uses."
    return [Section(table.title, [sentence], tables=[table])]


def accuracy(predicted: ForecastDocument) -> str:
    """Return a sentence with the errors on held-out runs, and whether each goal is met."""
    bounds = sum(each.endswith(f"/{NO_COMMUNICATION}") for each in predicted.fitted_on)
    runs = plural(len(predicted.fitted_on) - bounds, "timed run")
    fitted = f"The model is fitted on {runs} and {plural(bounds, 'no-communication bound')}"
    found = predicted.summary
    if found is None:
        return f"{fitted}; no other run is timed, so its error is unknown."
    return (
        f"{fitted} and predicts the step time of {found.runs} held-out runs with a median error of "
        f"{_against(found.median, _MEDIAN_GOAL)} and a worst of "
        f"{_against(found.worst, _WORST_GOAL)}. {percent(found.within, 0)} of the measurements are "
        "inside their 95 % prediction interval. With the no-communication bound of the same "
        "timing, which removes the drift of the machine, the errors are "
        f"{percent(found.median_of_communication)} and {percent(found.worst_of_communication)}."
    )


def _against(error: float, goal: float) -> str:
    return f"{percent(error)} (goal {percent(goal, 0)}: {'met' if error <= goal else 'missed'})"


def _table(title: str, columns: Sequence[Column], rows: Iterable[Document]) -> Table:
    return make_table(title, columns, [row.model_dump() for row in rows])


def _scaling(points: Sequence[Point]) -> Table:
    """Return the throughput by run and cluster, with a column for every number of ranks."""
    sizes = sorted({point.ranks for point in points})
    found = {(p.run, p.link, p.ranks): percent(p.efficiency) for p in points}
    meaning = "predicted throughput of a rank relative to one without communication"
    columns = [
        RUN,
        PRESET,
        *(Column(f"{n:,} ranks", "", words(str(n)), meaning) for n in sizes),
    ]
    rows: list[Row] = [
        {"run": run, "link": link, **{str(n): found[run, link, n] for n in sizes}}
        for run, link in dict.fromkeys((p.run, p.link) for p in points)
    ]
    return make_table("Predicted throughput", columns, rows)
