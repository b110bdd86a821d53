"""Section on what takes the time of a step: communication, sharding, and the number of ranks."""

import pandas as pd

from shardlab.core.numbers import percent, plural, within
from shardlab.report.columns import SCALING
from shardlab.report.evidence import Evidence
from shardlab.report.plots import breakdown_plot, scaling_plot
from shardlab.report.tables import ONE_DEVICE, Figure, Section, estimate
from shardlab.report.timings import location, without_link


def scaling(evidence: Evidence) -> Section:
    """Show the share of communication in a step, and throughput by ranks."""
    rows = evidence.timing_rows
    first = evidence.main_steps
    races = " What a search found is of its last race there." if evidence.found else ""
    return Section(
        "What takes the time?",
        items=[text for each in evidence.several for text in share(each, evidence.baseline)],
        figures=[
            Figure(
                "breakdown",
                "Compute, exposed communication, exposed copies and idle time sum to the traced "
                f"step; {location(first)}.{races}",
                breakdown_plot(evidence.main_traces),
            ),
            Figure(
                "scaling",
                "Throughput of all ranks, and the fraction of backward in which a collective ran. "
                "The dotted line is the no-communication bound.",
                scaling_plot(without_link(rows), evidence.runs, evidence.baseline),
            ),
        ],
        tables=[evidence.timing_table("Scaling", SCALING, scaling_rows(rows))],
        notes=[
            "The no-communication bound is the step time of ranks that train without "
            "communication, all at once.",
            *cores_note(rows),
        ],
    )


def scaling_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the timings without an emulated link of runs on several numbers of ranks: first
    one device alone, then run by run and by ascending ranks."""
    rows, first = without_link(rows), ONE_DEVICE
    scaled = rows.groupby("run")["world_size"].transform("nunique") > 1
    rows = rows[scaled | (rows["run"] == first)] if scaled.any() else rows[scaled]
    names = dict.fromkeys([first, *rows["run"]])
    runs = pd.Categorical(rows["run"], categories=[*names])
    return rows.assign(order=runs).sort_values(["order", "world_size"], kind="stable")


def share(timing: pd.DataFrame, baseline: str) -> list[str]:
    """Return a sentence on how much of the baseline's step is communication; none where the timing
    does not have it."""
    rows = timing[timing["run"] == baseline]
    if rows.empty:
        return []
    row = rows.iloc[0]
    parts = []
    if row["exposed_share"] >= 0:
        traced = percent(row["exposed_share"], 0)
        parts.append(f"{traced} of the step of {baseline} is communication (exposed, in the trace)")
    if row["bound_ratio"] > 0:
        cost, low, high = (max(0, 100 - 100 / end) for end in estimate(row, "bound_ratio"))
        of_step = "" if parts else f" of the step of {baseline}"
        parts.append(f"{within(cost, low, high, 0, ' %')}{of_step} with the cost of sharding")
    return [f"{location(timing)}: {', '.join(parts)}."] if parts else []


def cores_note(rows: pd.DataFrame) -> list[str]:
    """Return a sentence if ranks had less than a core for each of their threads."""
    crowded = rows[rows["shares_cores"]]
    if crowded.empty:
        return []
    most = crowded.loc[crowded["world_size"].idxmax()]
    return [
        f"{plural(most['world_size'], 'rank')} of {plural(most['threads'], 'thread')} shared "
        f"{plural(most['cores'], 'core')}: the efficiency relative to one rank contains this; what "
        "is relative to the no-communication bound does not. They are not compared with one device."
    ]
