"""A machine that is slower by a factor, for all runs, changes no ratio."""

import pytest

from benchmarks.foreign_load import changes
from shardlab.report.timings import timing_table
from tests.record_factory import BASELINE
from tests.timed_run_factory import make_timed


def table(times, steps):
    runs = [make_timed(run=run, step_ms=[times * ms for ms in each]) for run, each in steps.items()]
    return timing_table(runs, BASELINE)


def test_a_slower_machine_changes_no_ratio():
    steps = {BASELINE: [10.0, 12.0, 11.0], "ddp": [5.0, 6.5, 5.0]}
    row = changes(table(1, steps), table(3, steps)).loc["ddp"]
    assert row["change"] == pytest.approx(0)
    assert row["quiet"] == pytest.approx(row["loaded"])
    assert row["quiet_width"] == pytest.approx(row["loaded_width"])
    assert row["loaded"] * (1 + row["loaded_width"]) == pytest.approx(row["loaded_high"])
