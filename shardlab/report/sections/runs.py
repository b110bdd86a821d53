"""Sections with a row per run: headline, plots, comparison, breakdown, traffic, resources."""

from shardlab.report import columns
from shardlab.report.aggregate import loss_curves
from shardlab.report.evidence import Evidence, section_of_runs
from shardlab.report.plots import breakdown_plot, bytes_quality_plot, loss_plot, step_time_plot
from shardlab.report.sections.appendix import setting_line
from shardlab.report.tables import Figure, Section, Table


def headline(evidence: Evidence) -> Section:
    """Show the table that also stands in the README, with what was measured."""
    table = headline_table(evidence)
    return Section(table.title, tables=[table], notes=[setting_line(evidence)])


def headline_table(evidence: Evidence) -> Table:
    """Return time, bytes and quality of every run."""
    return evidence.run_table("Headline", columns.HEADLINE)


def plots(evidence: Evidence) -> Section:
    """Show loss, step time, bytes against quality, and where the step time goes."""
    compared, baseline = evidence.compared, evidence.baseline
    figures = [
        Figure(
            "loss",
            "Training loss, mean over seeds with a band of one standard deviation; below, the "
            "difference from the baseline at the same step.",
            loss_plot(loss_curves(evidence.losses), evidence.runs, baseline),
        ),
        Figure(
            "step_time",
            "Wall time of a step in the timing of all runs. The line marks the baseline.",
            step_time_plot(compared, baseline),
        ),
        Figure(
            "bytes_quality",
            "Quality against compression. Markers show the engine; the line marks the baseline.",
            bytes_quality_plot(compared, baseline),
        ),
        Figure(
            "breakdown",
            "Compute, exposed communication, exposed copies and idle time sum to the profiled "
            "step.",
            breakdown_plot(compared),
        ),
    ]
    return Section("Plots", figures=figures)


comparison = section_of_runs("Comparison", columns.COMPARISON)
breakdown = section_of_runs("Step breakdown", columns.BREAKDOWN)
traffic = section_of_runs("Traffic", columns.TRAFFIC)
codec_statistics = section_of_runs("Codec statistics", columns.CODECS)
efficiency = section_of_runs("Memory, compute and link", columns.EFFICIENCY)
