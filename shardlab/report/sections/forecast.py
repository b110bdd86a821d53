"""Section on the forecast: validation errors, and predictions for clusters."""

from shardlab.core.numbers import fixed, percent, plural, within
from shardlab.predict.results import ForecastDocument
from shardlab.report.columns import LINK, RANKS
from shardlab.report.evidence import Evidence
from shardlab.report.plots import forecast_plot
from shardlab.report.tables import RUN, Column, Figure, Section, make_table
from shardlab.results.timing_result import NO_COMMUNICATION

_MEDIAN_GOAL, _WORST_GOAL = 0.08, 0.20

CHECKS = [
    RUN,
    RANKS,
    LINK,
    Column(
        "predicted step",
        "ms",
        lambda row: within(row["predicted_ms"], row["low_ms"], row["high_ms"], 1),
        "step time that the model predicts, with its 95 % prediction interval",
    ),
    Column(
        "measured step",
        "ms",
        lambda row: fixed(row["measured_ms"], 1),
        "median over the repetitions of a timing that the model was not fitted on",
    ),
    Column("error", "%", "error", "predicted over measured step, minus 1"),
]


def forecast(evidence: Evidence) -> Section:
    """Show the errors on held-out timings, and predictions with their assumptions."""
    predicted = evidence.predicted
    held_out = [check for check in predicted.checks if check.held_out]
    checks = [c.model_dump() for c in sorted(held_out, key=lambda check: -abs(check.error))]
    table = make_table("Validation on held-out timings", CHECKS, checks)
    assumptions = [
        *predicted.assumptions,
        *(f"{name}: {source}." for name, source in predicted.links.items()),
    ]
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
        sections=[
            *([Section(table.title, tables=[table], folded=True)] if checks else []),
            Section("Assumptions", items=assumptions, folded=True),
        ],
    )


def accuracy(predicted: ForecastDocument) -> str:
    """Return a sentence with the errors on held-out runs, and whether each goal is met."""
    bounds = sum(name.endswith(f"/{NO_COMMUNICATION}") for name in predicted.fitted_on)
    runs = plural(len(predicted.fitted_on) - bounds, "timed run")
    fitted = f"The model is fitted on {runs} and {plural(bounds, 'no-communication bound')}"
    errors = predicted.summary
    if errors is None:
        return f"{fitted}; no other run is timed, so its error is unknown."
    return (
        f"{fitted} and predicts the step time of {errors.runs} held-out runs with a median error "
        f"of {_with_goal(errors.median, _MEDIAN_GOAL)} and a worst of "
        f"{_with_goal(errors.worst, _WORST_GOAL)}. {percent(errors.within, 0)} of the measurements "
        "are inside their 95 % prediction interval."
    )


def _with_goal(error: float, goal: float) -> str:
    return f"{percent(error)} (goal {percent(goal, 0)}: {'met' if error <= goal else 'missed'})"
