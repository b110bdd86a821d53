"""The profile stage keeps a row for each step and rank, and their mean is what the record holds."""

import csv

import pytest

from shardlab.profiling.analysis.breakdown import StepTimes, summarize
from stages.profile import write_rows


def step(rank: int, number: int, compute: float, exposed: float) -> StepTimes:
    return StepTimes(
        rank=rank,
        step=number,
        step_ms=10.0,
        compute_ms=compute,
        comm_ms=exposed,
        comm_ms_by_op={"gloo:all_reduce": exposed},
        comm_ms_by_unit={"h.0": exposed},
        comm_skew_ms=0.25 * exposed,
        comm_transfer_ms=0.75 * exposed,
        exposed_comm_ms=exposed,
        copy_ms=0.0,
        exposed_copy_ms=0.0,
        idle_ms=10.0 - compute - exposed,
        forward_ms=4.0,
        forward_compute_ms=4.0,
        forward_comm_ms=0.0,
        backward_ms=5.0,
        backward_compute_ms=compute - 4.0,
        backward_comm_ms=exposed,
        update_ms=1.0,
        update_compute_ms=0.0,
        update_comm_ms=0.0,
    )


def test_rows_hold_every_step_of_every_rank(tmp_path):
    steps = [step(rank, number, 6.0 + rank, 1.0 + number) for rank in (0, 1) for number in (0, 1)]
    write_rows(tmp_path / "rows.csv", steps)
    with (tmp_path / "rows.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rank"], row["step"]) for row in rows] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    for row in rows:
        parts = sum(float(row[key]) for key in ("compute_ms", "exposed_comm_ms", "idle_ms"))
        assert parts == pytest.approx(float(row["step_ms"]))
    mean = sum(float(row["compute_ms"]) for row in rows) / len(rows)
    assert summarize(steps).compute_ms == pytest.approx(mean)
