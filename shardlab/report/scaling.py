"""Is communication the bottleneck? What more ranks gain, and what they lose to communication."""

import math

import pandas as pd

from shardlab.core.timings import NO_COMMUNICATION
from shardlab.report.aggregate import verdict
from shardlab.report.numbers import percent, within
from shardlab.report.tables import Table, run_table
from shardlab.report.timing_columns import SCALING

_HALF = 2.0
"""times the step without communication, from which on communication takes most of a step"""


def unlinked(timed: pd.DataFrame) -> pd.DataFrame:
    """The rows of `timings.timing_table` of ranks that are joined as they are."""
    return timed[timed["bits_per_second"].isna()]


def scaling_table(timed: pd.DataFrame, baseline: str) -> Table:
    """Every run by its number of ranks, without an emulated link."""
    rows = unlinked(timed)
    # run by run, so that what changes with the ranks stands one above the other
    places = {run: place for place, run in enumerate(dict.fromkeys(rows["run"]))}
    keys = rows["run"].map(places)
    ordered = rows.assign(place=keys).sort_values(["place", "world_size"], kind="stable")
    return run_table("What more ranks gain", SCALING, ordered, baseline)


def bottleneck(timed: pd.DataFrame, baseline: str) -> list[str]:
    """A sentence for every timing of the baseline on several ranks, with its figures."""
    several = timed[(timed["run"] == baseline) & (timed["world_size"] > 1)]
    return [_sentence(row) for _, row in several.iterrows()]


def bottleneck_here(timed: pd.DataFrame, baseline: str, world_size: int) -> str:
    """The sentence for so many ranks without an emulated link."""
    rows = unlinked(timed)
    rows = rows[(rows["run"] == baseline) & (rows["world_size"] == world_size)]
    if rows.empty or world_size == 1:
        return (
            f"Whether communication is the bottleneck of {baseline} is not known: no timing has it "
            f"on {world_size} ranks without an emulated link."
        )
    return _sentence(rows.iloc[0])


def _sentence(row: pd.Series) -> str:
    low, high = row["bound_ratio_low"], row["bound_ratio_high"]
    judged = {
        "higher": "communication is the bottleneck",
        "lower": "communication is not the bottleneck",
        "same": "communication may or may not be the bottleneck",
        "unknown": "one round does not tell whether communication is the bottleneck",
    }[verdict(low, high, _HALF)]
    where = (
        "without an emulated link" if math.isnan(row["bits_per_second"]) else f"at {row['link']}"
    )
    lost = 1 - 1 / row["bound_ratio"]
    return (
        f"On {row['world_size']} ranks {where} {judged} of {row['run']}: its step takes "
        f"{within(row['bound_ratio'], low, high, 2)} times as long as one without communication, "
        f"which is {percent(lost, 0)} of it; in the trace, communication that no compute hides "
        f"takes {percent(row['exposed_share'], 0)} of a step."
    )


def sharing(timed: pd.DataFrame) -> str | None:
    """That ranks had less than a core for each of their threads, where it was so."""
    crowded = timed[timed["world_size"] * timed["threads"] > timed["cores"]]
    if crowded.empty:
        return None
    most = crowded.loc[crowded["world_size"].idxmax()]
    return (
        f"{most['world_size']} ranks of {_count(most['threads'], 'thread')} shared "
        f"{_count(most['cores'], 'core')}: the efficiency against one rank shows that as well; the "
        f"one against steps without communication does not."
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def runs_of(timed: pd.DataFrame) -> list[str]:
    """Names of the runs, without the bound."""
    return [run for run in dict.fromkeys(timed["run"]) if run != NO_COMMUNICATION]
