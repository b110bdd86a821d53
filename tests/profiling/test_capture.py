import functools
import gzip
import json
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.profiler import record_function

from shardlab.codecs.kernels.integers import KERNELS
from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.background import Background
from shardlab.comm.collective import Native
from shardlab.comm.ledger import Ledger
from shardlab.comm.transport import Transport
from shardlab.profiling.breakdown import OTHER, analyse, read_steps
from shardlab.profiling.capture import Capture
from shardlab.profiling.merge import merge_traces
from shardlab.profiling.trace_file import load_trace
from shardlab.train.launch import launch

STEPS = 2


def trace_of_two_ranks(folder, step):
    """The merged trace of two gloo ranks that run `step(weight, group)`."""

    def worker(group):
        weight = torch.randn(256, 256, requires_grad=True)
        with Capture(STEPS) as capture:
            for _ in range(capture.calls):
                step(weight, group)
                capture.step()
        capture.export(folder / f"{dist.get_rank(group)}.json.gz")

    launch(worker, 2, threads=1, timeout_s=60)
    merge_traces([folder / f"{rank}.json.gz" for rank in range(2)], folder / "trace.json.gz")
    return folder / "trace.json.gz"


def blocking(weight, group):
    loss = (torch.randn(64, 256) @ weight).square().mean()
    with record_function("shardlab::backward"):
        loss.backward()
        dist.all_reduce(weight.grad, group=group)
    KERNELS["int8"].encode(weight.grad.view(-1), 128)


def overlapping(weight, group):
    loss = (torch.randn(64, 256) @ weight).square().mean()
    with record_function("shardlab::backward"):
        loss.backward()
        work = dist.all_reduce(torch.randn(1 << 20), group=group, async_op=True)
        # as long as it takes, however busy the machine
        while not work.is_completed():
            torch.randn(256, 256) @ weight.detach()
        work.wait()


@functools.cache
def lane():
    """A thread of this process that is there before the trace begins."""
    return Background("lane")


A, B = Unit("h.0"), Unit("h.1")


@functools.cache
def collectives(group):
    """Two routes, which are there before the trace begins."""
    return [
        kind(group, Ledger(), "gradients", *rest)
        for kind, *rest in ((Native,), (AllToAllCollective, make_codec("int8")))
    ]


def of_two_units(weight, group):
    native, coded = collectives(group)
    vector, part = torch.ones(1 << 14), torch.ones(1 << 13)
    work = (
        native.start_all_reduce(vector, 0.5, A),
        native.start_all_reduce(vector.clone(), 0.5, B),
    )
    native.reduce_scatter(part, vector, 1.0, B)
    native.all_gather(vector.clone(), part, A)
    coded.all_reduce(vector.clone(), 1.0, B)
    lane().start(coded.all_gather, vector.clone(), part, A).wait()
    with record_function("shardlab::backward"):
        (torch.randn(64, 256) @ weight).square().mean().backward()
    for each in work:
        each.wait()
    dist.all_reduce(torch.zeros(1), group=group)


def in_a_thread_of_its_own(weight, group):
    other = 1 - dist.get_rank(group)
    parts = [torch.ones(1 << 18 if rank == other else 0) for rank in range(2)]
    running = lane().start(Transport(group).all_to_all, parts, [p.clone() for p in parts])
    loss = (torch.randn(64, 256) @ weight).square().mean()
    with record_function("shardlab::backward"):
        loss.backward()
    running.wait()


def test_blocking_collectives_do_not_overlap(tmp_path):
    path = trace_of_two_ranks(tmp_path, blocking)
    steps = [(times.rank, times.step) for times in read_steps(path)]
    assert steps == [(rank, step) for rank in (0, 1) for step in (1, 2)]
    assert any(event["name"] == "shardlab::int8_encode" for event in load_trace(path).events)
    result = analyse(path)
    assert set(result.comm_ms_by_op) == {"gloo:all_reduce"}
    assert result.comm_ms_per_step > 0
    assert result.overlap < 0.02
    assert 0 < result.backward_comm_share < 1
    parts = result.compute_ms + result.exposed_comm_ms + result.idle_ms
    assert parts == pytest.approx(result.profiled_step_ms)


def test_asynchronous_collectives_overlap_with_compute(tmp_path):
    result = analyse(trace_of_two_ranks(tmp_path, overlapping))
    assert result.overlap > 0.05
    assert result.exposed_comm_ms < result.comm_ms_per_step


def test_communication_on_a_separate_thread_is_captured(tmp_path):
    result = analyse(trace_of_two_ranks(tmp_path, in_a_thread_of_its_own))
    assert result.comm_ms_by_op.keys() == {"gloo:send", "gloo:recv"}
    assert result.comm_ms_per_step > 0


def test_merged_trace_follows_the_trace_event_format(tmp_path):
    """The Trace Event Format, as ui.perfetto.dev and chrome://tracing read it."""
    path = trace_of_two_ranks(tmp_path, overlapping)
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    kinds = {kind: [e for e in events if e["ph"] == kind] for kind in {e["ph"] for e in events}}
    assert kinds.keys() == {"M", "X", "s", "f"}
    assert all(isinstance(e["pid"], int) and isinstance(e["name"], str) for e in events)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 and isinstance(e["tid"], int) for e in kinds["X"])
    starts, ends = ({(e["pid"], e["id"]): e["ts"] for e in kinds[kind]} for kind in "sf")
    assert starts.keys() == ends.keys()
    assert all(starts[arrow] <= ends[arrow] for arrow in starts)
    order = {e["pid"]: e["args"] for e in kinds["M"] if e["name"] == "process_sort_index"}
    processes = {e["pid"] for e in kinds["X"]}
    assert processes == order.keys() == {0, 1}
    assert [order[pid]["sort_index"] for pid in (0, 1)] == [0, 1]
    named = {(e["pid"], e["tid"]) for e in kinds["M"] if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in kinds["X"]} <= named


def test_communication_is_attributed_to_units(tmp_path):
    result = analyse(trace_of_two_ranks(tmp_path, of_two_units))
    assert set(result.comm_ms_by_op) == {"gloo:all_reduce", "gloo:send", "gloo:recv"}
    assert set(result.comm_ms_by_unit) == {"h.0", "h.1", OTHER}
    parts = result.comm_skew_ms + result.comm_transfer_ms
    assert parts == pytest.approx(result.comm_ms_per_step)


def test_wrong_number_of_steps_is_an_error():
    with pytest.raises(RuntimeError, match="called 1 times, not 3"), Capture(2) as capture:
        capture.step()


_CAPTURE = """
import os
from shardlab.profiling.capture import Capture

os.environ.clear()
with Capture(1) as capture:
    for _ in range(capture.calls):
        capture.step()
"""


@pytest.mark.long
def test_the_tracing_library_is_quiet_whatever_the_environment():
    """In a process of its own: the library reads its level once, and other tests trace as well."""
    done = subprocess.run([sys.executable, "-c", _CAPTURE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
