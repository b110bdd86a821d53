"""Is communication the bottleneck? What more ranks gain, and what they lose to communication."""

import pandas as pd

from shardlab.records.run import Setting
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


def bottleneck_of(timed: pd.DataFrame, setting: Setting) -> str:
    """The sentence for the run, ranks and link of a record."""
    if setting.world_size == 1:
        return "A single rank has nobody to communicate with."
    rows = timed[
        (timed["run"] == setting.run)
        & (timed["world_size"] == setting.world_size)
        & (timed["link"] == setting.link)
    ]
    if rows.empty:
        return (
            f"Whether communication is the bottleneck of {setting.run} is not known: no timing has "
            f"it on {setting.world_size} ranks (link: {setting.link})."
        )
    return _sentence(rows.iloc[0])


def _sentence(row: pd.Series) -> str:
    ratio = [row[f"bound_ratio{end}"] for end in ("", "_low", "_high")]
    saved = max(0.0, 1 - 1 / ratio[0])
    return (
        f"On {row['world_size']} ranks (link: {row['link']}) {_judged(row)} of {row['run']}: its "
        f"step takes {within(*ratio, 2)} times as long as one without communication, so that "
        f"{percent(saved, 0)} of it would fall away, and by the trace "
        f"{percent(row['exposed_share'], 0)} of it is communication that no compute hides."
    )


def _judged(row: pd.Series) -> str:
    """By both measures: steps without communication go without the work of sharding, too."""
    compared = verdict(row["bound_ratio_low"], row["bound_ratio_high"], _HALF)
    if compared == "unknown":
        return "a single round does not tell whether communication is the bottleneck"
    traced = "higher" if row["exposed_share"] > 1 / _HALF else "lower"
    if compared != traced:
        return "it is not clear whether communication is the bottleneck"
    return f"communication is {'' if traced == 'higher' else 'not '}the bottleneck"


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
