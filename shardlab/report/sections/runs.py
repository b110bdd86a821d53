"""Sections with a row per run: comparison, quality, breakdown, traffic, resources."""

from collections.abc import Callable, Sequence

from shardlab.report import columns
from shardlab.report.aggregate import loss_curves
from shardlab.report.aim import aim
from shardlab.report.evidence import Evidence
from shardlab.report.plots import bytes_quality_plot, loss_plot
from shardlab.report.sections.appendix import setting_line
from shardlab.report.tables import Column, Figure, Section, Table
from shardlab.report.timings import location


def comparison(evidence: Evidence) -> Section:
    """Show what each run costs and how long its steps take on each link, one device alone first."""
    table = comparison_table(evidence)
    return Section(table.title, tables=[table], notes=[setting_line(evidence)])


def comparison_table(evidence: Evidence, extra: bool = True) -> Table:
    """Return the comparison, with or without the columns that the page folds."""
    shown = columns.comparison(evidence.main_timing, evidence.main_group)
    kept = [column for column in shown if extra or not column.extra]
    title = f"Comparison, {location(evidence.main_steps)}"
    return evidence.main_table(title, kept, evidence.main_rows)


def quality(evidence: Evidence) -> Section:
    """Show losses, quality against compression, and which runs meet the aim of compression."""
    compared, baseline = evidence.compared, evidence.baseline
    stated, lines = aim(evidence.trained, baseline)
    figures = [
        Figure(
            "loss",
            "Training loss, mean over seeds with a band of one standard deviation; below, the "
            "difference from the baseline at the same step.",
            loss_plot(loss_curves(evidence.losses), [*evidence.losses], baseline),
        ),
        *_validation_curve(evidence),
        Figure(
            "bytes_quality",
            "Quality against compression. Markers show the engine; the line marks the baseline.",
            bytes_quality_plot(compared, baseline),
        ),
    ]
    return Section("What does it cost in quality?", sentences=stated, items=lines, figures=figures)


def _validation_curve(evidence: Evidence) -> list[Figure]:
    """Return the plot of the validation losses during training; none where there are none."""
    if not evidence.validation:
        return []
    curves = loss_curves(evidence.validation)
    runs = [*evidence.validation]
    return [
        Figure(
            "validation",
            "Validation loss during training, likewise, of the parameters after each step.",
            loss_plot(curves, runs, evidence.baseline, "validation"),
        )
    ]


def _section_of_runs(title: str, shown: Sequence[Column]) -> Callable[[Evidence], Section]:
    """Return the builder of a folded section that is one table with a row per run."""
    return lambda evidence: Section(title, tables=[evidence.run_table(title, shown)], folded=True)


breakdown = _section_of_runs("Step breakdown", columns.BREAKDOWN)
traffic = _section_of_runs("Traffic", columns.TRAFFIC)
codec_statistics = _section_of_runs("Codec statistics", columns.CODECS)
efficiency = _section_of_runs("Memory, compute and link", columns.EFFICIENCY)
