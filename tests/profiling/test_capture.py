"""Traces that `Capture` takes of two gloo ranks, merged."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile, record_function

from shardlab.codecs.base import Unit
from shardlab.codecs.registry import make_codec
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.background import Background
from shardlab.comm.codec_collective import Route
from shardlab.comm.ledger import Ledger
from shardlab.comm.uncompressed import Native
from shardlab.core.errors import StorageError
from shardlab.profiling.breakdown import OTHER, analyse, read_steps
from shardlab.profiling.capture import Capture
from shardlab.profiling.merge import merge_traces
from shardlab.profiling.trace_file import load_trace
from shardlab.train.launch import launch

STEPS = 2
A, B = Unit("h.0"), Unit("h.1")


def worker(group, folder):
    """Steps with blocking and asynchronous collectives of two units, on two threads."""
    weight = torch.randn(256, 256, requires_grad=True)
    native = Native(group, Ledger(), "gradients")
    coded = AllToAllCollective(group, Ledger(), "gradients", Route(make_codec("int8")))
    lane = Background("lane")
    vector, part = torch.ones(1 << 14), torch.ones(1 << 13)
    with Capture(STEPS) as capture:
        for _ in range(capture.calls):
            works = [
                native.start_all_reduce(vector, 0.5, A),
                native.start_all_reduce(vector.clone(), 0.5, B),
            ]
            native.reduce_scatter(part, vector, 1.0, B)
            native.all_gather(vector.clone(), part, A)
            coded.all_reduce(vector.clone(), 1.0, B)
            lane.start(coded.all_gather, vector.clone(), part, A).wait()
            with record_function("shardlab::backward"):
                (torch.randn(64, 256) @ weight).square().mean().backward()
            for work in works:
                work.wait()
            dist.all_reduce(torch.zeros(1), group=group)
            capture.step()
    capture.export(folder / f"{dist.get_rank(group)}.json.gz")


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trace")
    launch(lambda group: worker(group, folder), 2, threads=1, timeout_s=60)
    merge_traces([folder / f"{rank}.json.gz" for rank in range(2)], folder / "trace.json.gz")
    return folder / "trace.json.gz"


def test_steps_of_all_ranks_are_divided_by_operation_and_unit(trace):
    steps = [(times.rank, times.step) for times in read_steps(trace)]
    assert steps == [(rank, step) for rank in (0, 1) for step in (1, 2)]
    result = analyse(trace)
    # messages of the second thread are captured, too
    assert set(result.comm_ms_by_op) == {"gloo:all_reduce", "gloo:send", "gloo:recv"}
    assert set(result.comm_ms_by_unit) == {"h.0", "h.1", OTHER}
    assert result.comm_skew_ms + result.comm_transfer_ms == pytest.approx(result.comm_ms_per_step)
    parts = result.compute_ms + result.exposed_comm_ms + result.idle_ms
    assert parts == pytest.approx(result.profiled_step_ms)


def test_merged_trace_follows_the_trace_event_format(trace):
    """The Trace Event Format, as ui.perfetto.dev and chrome://tracing read it."""
    events = load_trace(trace).events
    assert any(event["name"] == "shardlab::int8_encode" for event in events)
    kinds = {kind: [e for e in events if e["ph"] == kind] for kind in {e["ph"] for e in events}}
    assert kinds.keys() == {"M", "X", "s", "f"}
    assert all(isinstance(e["pid"], int) and isinstance(e["name"], str) for e in events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and isinstance(e["tid"], int) for e in kinds["X"])
    starts, ends = ({(e["pid"], e["id"]): e["ts"] for e in kinds[kind]} for kind in "sf")
    assert starts.keys() == ends.keys()
    assert all(starts[arrow] <= ends[arrow] for arrow in starts)
    order = {e["pid"]: e["args"] for e in kinds["M"] if e["name"] == "process_sort_index"}
    assert {pid: args["sort_index"] for pid, args in order.items()} == {0: 0, 1: 1}
    named = {(e["pid"], e["tid"]) for e in kinds["M"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in kinds["X"]} <= named


def test_wrong_number_of_steps_is_an_error():
    with pytest.raises(RuntimeError, match="called 1 times, not 3"), Capture(2) as capture:
        capture.step()


def test_a_trace_that_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "export_chrome_trace", lambda *_: None)  # as torch on a full disk
    with Capture(1) as capture:
        for _ in range(capture.calls):
            capture.step()
    with pytest.raises(StorageError, match="cannot hold the trace of 2 steps: free space, or"):
        capture.export(tmp_path / "trace.json.gz")
