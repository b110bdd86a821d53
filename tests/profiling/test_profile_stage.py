"""The profile stage: a row for each step and rank, and their mean, which the record holds."""

import csv
from pathlib import Path

import pytest

from shardlab.config.parameters import Parameters
from shardlab.config.run_record import Breakdown
from shardlab.core.errors import UserError
from shardlab.core.files import write_json
from shardlab.profiling.merge import merge_traces
from stages.profile import main, names_run, of_traces
from tests.trace_factory import WORKER, event, label, step, write_rank


@pytest.fixture
def params(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("params.yaml").write_text("seeds: [3]\n")
    return Parameters("params.yaml")


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


def test_files_in_place_of_a_run_are_broken_down(tmp_path, monkeypatch, capsys):
    """As in a folder without an experiment: nothing is read or written but what is named."""
    monkeypatch.chdir(tmp_path)
    write_rank(tmp_path / "0.json", [label("ProfilerStep#1", 0, 1000), event("aten::mm", 0, 500)])
    Path("trace").symlink_to("0.json")
    for arguments in (["./0.json"], ["trace"], ["--csv", "rows.csv", "0.json"]):
        of_traces(arguments)
        shown = capsys.readouterr().out
        assert "50.0" in shown and "update: unknown" in shown
    with Path("rows.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["compute_ms"], row["forward_ms"]) == ("0.5", "")
    for arguments, error in (
        (["none.json"], "none.json: no such file: give traces of torch.profiler, or RUN"),
        (["0.json", "--cvs", "rows.csv"], "unrecognized arguments: --cvs rows.csv; see python -m "),
    ):
        with pytest.raises(SystemExit) as end:
            of_traces(arguments)
        assert end.value.code == 2
        assert capsys.readouterr().err.startswith(f"profile: error: {error}")
    assert {path.name for path in tmp_path.iterdir()} == {"0.json", "rows.csv", "trace"}


def test_a_run_is_a_name_that_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trace").touch()
    Path("traces").mkdir()
    assert all(names_run(words.split()) for words in ("ddp", "--set seeds=[0] ddp --params x.yaml"))
    assert not any(
        names_run(words.split()) for words in ("trace.json", "trace", "traces", "--csv rows ddp")
    )


def test_a_missing_trace_writes_nothing(params, tmp_path):
    fix = r"metrics\.json: no such file: run python -m stages\.train --run ddp --seed 3"
    with pytest.raises(UserError, match=fix):
        main(params, "ddp")
    assert not (tmp_path / "results").exists()
