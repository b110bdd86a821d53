import gzip
import json

import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.merge import merge_traces
from tests.trace_factory import event, step, write_rank


def load(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def flow(phase, number, time):
    return {"ph": phase, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "pid": 10, "tid": 10} | {
        "ts": time
    }


def test_each_rank_is_a_named_process(tmp_path):
    paths = [write_rank(tmp_path / f"{r}.json", step(1, 0, 10), r) for r in range(2)]
    merge_traces(paths, tmp_path / "all.json.gz")
    trace = load(tmp_path / "all.json.gz")
    names = {
        e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    assert sorted(names.values()) == ["rank 0", "rank 1"]
    assert {f"rank {rank}" for rank in trace["ranks"].values()} == set(names.values())
    assert {str(pid): name for pid, name in names.items()} == {
        pid: f"rank {rank}" for pid, rank in trace["ranks"].items()
    }
    assert trace["distributedInfo"]["1"]["rank"] == 1


def test_clocks_with_different_bases_are_aligned(tmp_path):
    paths = [
        write_rank(tmp_path / "0.json", [event("late", 100, 150)], 0, base=5_000_000_000),
        write_rank(tmp_path / "1.json", [event("early", 100, 150)], 1, base=4_000_000_000),
    ]
    merge_traces(paths, tmp_path / "all.json.gz")
    trace = load(tmp_path / "all.json.gz")
    times = {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "X"}
    assert trace["baseTimeNanoseconds"] == 4_000_000_000
    assert times["late"] - times["early"] == pytest.approx(1e6)


def test_flow_arrows_of_ranks_have_distinct_ids(tmp_path):
    arrow = [flow("s", 7, 1), flow("f", 7, 2)]
    paths = [write_rank(tmp_path / f"{r}.json", arrow, r) for r in range(2)]
    merge_traces(paths, tmp_path / "all.json.gz")
    by_process = {}
    for e in load(tmp_path / "all.json.gz")["traceEvents"]:
        if e["ph"] in "sf":
            by_process.setdefault(e["pid"], set()).add(e["id"])
    first, second = by_process.values()
    assert len(first) == len(second) == 1
    assert first != second


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
