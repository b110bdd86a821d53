"""What the report says of timings: is communication the bottleneck, and at which rate of a link."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from shardlab.experiment.schema import Quality
from shardlab.records.timing import TimedRun
from shardlab.report.crossover import codec_table, fastest, step_table
from shardlab.report.equal_quality import Losses, quality_tables
from shardlab.report.link_timings import Crossover, crossovers
from shardlab.report.scaling import bottleneck, scaling_table, sharing
from shardlab.report.tables import Table, run_table
from shardlab.report.timing_columns import TIMED
from shardlab.report.timings import timing_table


@dataclass(frozen=True)
class LinkStory:
    """One number of ranks on links of different rates."""

    title: str
    fastest: str
    tables: list[Table]


@dataclass(frozen=True)
class TimingRoom:
    """Sentences and tables in the order in which they are shown."""

    timed: pd.DataFrame
    """`timings.timing_table`"""
    groups: list[Crossover]
    bottleneck: list[str]
    sharing: str | None
    scaling: Table
    links: list[LinkStory]
    details: Table

    @property
    def tables(self) -> list[Table]:
        """All of them."""
        return [self.scaling, *(t for link in self.links for t in link.tables), self.details]


def timing_room(
    timed: Sequence[TimedRun], losses: Losses, quality: Quality, trained_on: int, baseline: str
) -> TimingRoom:
    """From the timed runs and the matrix.

    Args:
        trained_on: ranks of the matrix; losses are those of that many ranks alone.
    """
    table = timing_table(timed, baseline)
    groups = crossovers(timed)
    return TimingRoom(
        timed=table,
        groups=groups,
        bottleneck=bottleneck(table, baseline),
        sharing=sharing(table),
        scaling=scaling_table(table, baseline),
        links=[
            _story(group, losses if group.world_size == trained_on else {}, quality, baseline)
            for group in groups
        ],
        details=run_table("All timings", TIMED, table, baseline),
    )


def _story(group: Crossover, losses: Losses, quality: Quality, baseline: str) -> LinkStory:
    codecs = codec_table(group)
    tables = [
        step_table(group, baseline),
        *([codecs] if codecs.rows else []),
        *quality_tables(group, losses, quality, baseline),
    ]
    return LinkStory(group.title, fastest(group, baseline), tables)
