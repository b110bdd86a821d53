"""Section on scaling: throughput by ranks, and whether communication is the bottleneck."""

import pandas as pd

from shardlab.config.run_record import Setting
from shardlab.report.aggregate import verdict
from shardlab.report.columns import SCALING
from shardlab.report.evidence import Evidence
from shardlab.report.plots import scaling_plot
from shardlab.report.tables import Figure, Section, estimate, percent, plural, within
from shardlab.report.timings import without_link

_HALF = 2.0
"""step over its no-communication bound from which communication takes most of a step"""


def scaling(evidence: Evidence) -> Section:
    """Show throughput by ranks, and compare steps with the no-communication bound."""
    rows, baseline = evidence.timing_rows, evidence.baseline
    return Section(
        "Is communication the bottleneck?",
        sentences=[
            "Timings are measured apart from training: all runs have an engine in the same "
            "processes and their steps are interleaved in random order. The no-communication bound "
            "is the step time of ranks that train without communication.",
            *cores_note(rows),
        ],
        items=bottleneck(rows, baseline),
        figures=[
            Figure(
                "scaling",
                "Throughput of all ranks, and the fraction of backward in which a collective ran. "
                "The dotted line is the no-communication bound.",
                scaling_plot(without_link(rows), evidence.runs, baseline),
            )
        ],
        tables=[evidence.timing_table("Scaling", SCALING, scaling_rows(rows))],
    )


def scaling_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the timings without an emulated link, run by run and by ascending ranks."""
    rows = without_link(rows)
    runs = pd.Categorical(rows["run"], categories=rows["run"].unique())
    return rows.assign(order=runs).sort_values(["order", "world_size"], kind="stable")


def bottleneck(rows: pd.DataFrame, baseline: str) -> list[str]:
    """Return a sentence for every timing of the baseline on several ranks."""
    several = rows[(rows["run"] == baseline) & (rows["world_size"] > 1)]
    return [_sentence(row) for _, row in several.iterrows()]


def bottleneck_of(rows: pd.DataFrame, setting: Setting) -> str:
    """Return the sentence for the run, ranks and link of a record."""
    if setting.world_size == 1:
        return "A single rank does not communicate."
    rows = rows[(rows["world_size"] == setting.world_size) & (rows["link"] == setting.link)]
    sentences = bottleneck(rows, setting.run)
    return (
        sentences[0]
        if sentences
        else f"Whether communication is the bottleneck of {setting.run} is unknown: it is not "
        f"timed on {setting.world_size} ranks (link: {setting.link})."
    )


def _sentence(row: pd.Series) -> str:
    ratio, low, high = estimate(row, "bound_ratio")
    return (
        f"On {row['world_size']} ranks (link: {row['link']}) {_verdict(row)} of {row['run']}: its "
        f"step takes {within(ratio, low, high, 2)} times the no-communication bound, so "
        f"{percent(max(0.0, 1 - 1 / ratio), 0)} of it is the cost of sharding and "
        f"communication; in the trace {percent(row['exposed_share'], 0)} of it is exposed "
        "communication."
    )


def _verdict(row: pd.Series) -> str:
    """Judge by both measures, since the bound leaves out the work of sharding, too."""
    by_bound = verdict(row["bound_ratio_low"], row["bound_ratio_high"], _HALF)
    if by_bound == "unknown":
        return "a single repetition cannot show whether communication is the bottleneck"
    by_trace = "higher" if row["exposed_share"] > 1 / _HALF else "lower"
    if by_bound != by_trace:
        return "it is not clear whether communication is the bottleneck"
    return f"communication is {'' if by_trace == 'higher' else 'not '}the bottleneck"


def cores_note(rows: pd.DataFrame) -> list[str]:
    """Return a sentence if ranks had less than a core for each of their threads."""
    crowded = rows[rows["world_size"] * rows["threads"] > rows["cores"]]
    if crowded.empty:
        return []
    most = crowded.loc[crowded["world_size"].idxmax()]
    return [
        f"{plural(most['world_size'], 'rank')} of {plural(most['threads'], 'thread')} shared "
        f"{plural(most['cores'], 'core')}: the efficiency relative to one rank contains this, the "
        "fraction of the no-communication bound does not."
    ]
