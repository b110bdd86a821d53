import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.merge import merge_traces
from shardlab.profiling.trace_file import load_trace
from tests.trace_factory import event, step, write_rank


def flow(phase, time):
    times = {"id": 7, "pid": 10, "tid": 10, "ts": time}
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", **times}


def test_ranks_are_named_processes_with_one_clock_and_distinct_arrows(tmp_path):
    arrow = [flow("s", 1), flow("f", 2)]
    paths = [
        write_rank(tmp_path / f"{rank}.json", [*arrow, event(name, 100, 150)], rank, base=base)
        for rank, name, base in ((0, "late", 5_000_000_000), (1, "early", 4_000_000_000))
    ]
    merge_traces(paths, tmp_path / "all.json.gz")
    header, events = load_trace(tmp_path / "all.json.gz")
    names = {str(e["pid"]): e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {pid: f"rank {rank}" for pid, rank in header["ranks"].items()}
    assert sorted(names.values()) == ["rank 0", "rank 1"]
    assert header["distributedInfo"]["1"]["rank"] == 1
    times = {e["name"]: e["ts"] for e in events if e["ph"] == "X"}
    assert header["baseTimeNanoseconds"] == 4_000_000_000
    assert times["late"] - times["early"] == pytest.approx(1e6)
    arrows = {(e["pid"], e["id"]) for e in events if e["ph"] in "sf"}
    assert len(arrows) == len({number for _, number in arrows}) == 2


def test_equal_traces_merge_to_equal_files(tmp_path):
    path = write_rank(tmp_path / "0.json", step(1, 0, 10))
    merge_traces([path], tmp_path / "a.json.gz")
    merge_traces([path], tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_traces_out_of_order_are_refused_and_nothing_is_written(tmp_path):
    paths = [write_rank(tmp_path / f"{r}.json", step(1, 0, 10), 1 - r) for r in range(2)]
    with pytest.raises(UserError, match="is the trace of rank 1, not 0"):
        merge_traces(paths, tmp_path / "all.json.gz")
    assert not (tmp_path / "all.json.gz").exists()
