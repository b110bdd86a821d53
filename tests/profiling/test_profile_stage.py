"""The profile stage: a row for each step and rank, and their mean, which the record holds."""

import csv
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from shardlab.profiling.merge import merge_traces
from shardlab.results.result import Breakdown
from stages.profile import main
from stages.sections import Sections
from tests.trace_factory import WORKER, event, label, step, write_rank


@pytest.fixture
def params(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("params.yaml").write_text("seeds: [3]\n")
    return Sections("params.yaml")


def test_rows_hold_every_step_of_every_rank_and_the_breakdown_their_means(params, tmp_path):
    ranks = []
    for rank in range(2):
        events = [*step(1, 0, 1000), event("aten::mm", 0, 500 + 100 * rank)]
        events += [label("gloo:all_reduce", 400, 600, WORKER), *step(2, 1000, 3000)]
        ranks.append(write_rank(tmp_path / f"{rank}.json", events, rank))
    trace = Path("results/train/ddp/seed3/trace.json.gz")
    merge_traces(ranks, trace)
    write_json(trace.with_name("metrics.json"), {})
    main(params, "ddp")
    with Path("results/profile/ddp/seed3.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    places = [(row["rank"], row["step"]) for row in rows]
    assert places == [("0", "1"), ("0", "2"), ("1", "1"), ("1", "2")]
    for row in rows:
        parts = sum(float(row[key]) for key in ("compute_ms", "exposed_comm_ms", "idle_ms"))
        assert parts == pytest.approx(float(row["step_ms"]))
    breakdown = Breakdown.from_file("results/profile/ddp/seed3.json", "profile it")
    for name in ("compute_ms", "comm_skew_ms", "idle_ms", "backward_comm_ms"):
        mean = sum(float(row[name]) for row in rows) / len(rows)
        assert getattr(breakdown, name) == pytest.approx(mean)


def test_collectives_of_ranks_that_train_alone_have_an_unknown_skew(params, tmp_path):
    ranks = []
    for rank, start in enumerate((100, 700)):
        events = [*step(1, 0, 1000), label("gloo:all_reduce", start, start + 100, WORKER)]
        ranks.append(write_rank(tmp_path / f"{rank}.json", events, rank))
    trace = Path("results/train/ddp/seed3/trace.json.gz")
    merge_traces(ranks, trace)
    write_json(trace.with_name("metrics.json"), {})
    main(params, "ddp")
    breakdown = Breakdown.from_file("results/profile/ddp/seed3.json", "profile it")
    assert breakdown.comm_skew_ms is breakdown.comm_transfer_ms is None
    assert breakdown.comm_ms_per_step == pytest.approx(0.1)


def test_a_missing_trace_writes_nothing(params, tmp_path):
    fix = r"metrics\.json: no such file: run shardlab train --run ddp --seed 3"
    with pytest.raises(UserError, match=fix):
        main(params, "ddp")
    assert not (tmp_path / "results").exists()
