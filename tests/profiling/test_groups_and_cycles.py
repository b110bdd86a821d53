"""Waits inside process groups, cycles of a schedule, and work on devices without a launch."""

import gzip
import json

import pytest

from shardlab.profiling.job import break_down
from shardlab.profiling.merge import merge_traces
from tests.profiling.nccl_trace_factory import AUTOGRAD, HOST, NCCL_STREAM, MadeTrace

NODE = "autograd::engine::evaluate_function: MmBackward0"


def written(folder, trace, base_us=0, world_size=2):
    path = trace.write(folder / f"{trace.rank}-{base_us}.json")
    trace = json.loads(path.read_text())
    trace["distributedInfo"]["world_size"] = world_size
    trace["baseTimeNanoseconds"] += 1000 * base_us
    path.write_text(json.dumps(trace))
    return path


def sent(trace, operation, start, end, ranks, name="0"):
    """A collective or a message whose record names its group."""
    args = {"Process Group Name": name, "Process Group Ranks": str(ranks)}
    args |= {"Group size": len(ranks), "Collective name": operation}
    kernel = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    launched = start - 5
    return trace.launch("kernel", kernel, start, end, NCCL_STREAM, launched, HOST, **args)


def ranks_of(count, number=1):
    traces = [MadeTrace(rank) for rank in range(count)]
    for trace in traces:
        trace.label(f"ProfilerStep#{number}", 0, 1000)
        trace.kernel(10, 100, launched=5)
    return traces


def skews(job):
    return [None if s.comm_skew_ms is None else round(s.comm_skew_ms, 3) for s in job.steps]


def test_ranks_wait_for_those_of_their_group(tmp_path):
    """A mesh of two by two: ranks 2 and 3 begin everything 50 us later."""
    traces = ranks_of(4)
    for rank, trace in enumerate(traces):
        late = 50 * (rank // 2)
        pair, across = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        sent(trace, "allreduce", 200 + late, 300 + late, pair, "tp")
        sent(trace, "allreduce", 400 + late, 500, across, "dp")
    job = break_down([written(tmp_path, trace, world_size=4) for trace in traces])
    assert skews(job) == [0.05, 0.05, 0, 0]
    # a rank of a group that does not take part
    extra = ranks_of(4)
    for trace in extra[:3]:
        sent(trace, "allreduce", 200, 300, [0, 1] if trace.rank < 2 else [2, 3])
    job = break_down([written(tmp_path, trace, world_size=4) for trace in extra])
    assert skews(job) == [0, 0, None, 0]
    assert any("match none on the other ranks" in note for note in job.notes)


def test_a_receiver_waits_for_the_sender(tmp_path):
    """Two stages of a pipeline: activations one way, gradients the other way."""
    first, last = ranks_of(2)
    sent(first, "send", 200, 220, [0, 1]), sent(first, "recv", 230, 420, [0, 1])
    sent(last, "recv", 110, 220, [0, 1]), sent(last, "send", 400, 420, [0, 1])
    job = break_down([written(tmp_path, trace) for trace in (first, last)])
    assert skews(job) == [0.17, 0.09]
    # of more ranks the record does not say which one receives
    stages = ranks_of(3)
    for trace, operation in zip(stages, ("send", "recv", "send"), strict=True):
        sent(trace, operation, 200, 220, [0, 1, 2])
    job = break_down([written(tmp_path, trace, world_size=3) for trace in stages])
    assert skews(job) == [None, None, None]


def cycle(number, late=0):
    traces = ranks_of(2, number)
    for rank, trace in enumerate(traces):
        sent(trace, "allreduce", 200 + late * rank, 400, [0, 1])
    return traces


def test_cycles_of_a_schedule_are_steps_of_the_same_ranks(tmp_path):
    files = [
        written(tmp_path, trace, base_us=hour * 3_600_000_000)
        for hour in range(3)
        for trace in cycle(3 + 10 * hour, late=30)
    ]
    for paths in (files, [tmp_path]):
        job = break_down(paths)
        assert [(s.rank, s.step) for s in job.steps] == [
            (r, n) for r in (0, 1) for n in (3, 13, 23)
        ]
        assert skews(job) == [0.03] * 3 + [0] * 3
    # of a rank alone
    job = break_down(files[::2])
    assert [(s.rank, s.step) for s in job.steps] == [(0, 3), (0, 13), (0, 23)]
    assert skews(job) == [None] * 3


@pytest.mark.parametrize("apart_us", [1_800_000_000, 500, -500])
def test_skew_is_unknown_where_clocks_of_hosts_are_apart(tmp_path, apart_us):
    """By half an hour, or by less than a step and more than a collective."""
    paths = [
        written(tmp_path, trace, base_us=apart_us * rank)
        for rank, trace in enumerate(cycle(3, late=30))
    ]
    job = break_down(paths)
    assert skews(job) == [None, None]
    assert any(note.startswith("all ranks: skew, transfer: unknown") for note in job.notes)


def test_clocks_may_differ_by_less_than_collectives_take(tmp_path):
    """A short collective seems to end on one host before the other begins it."""
    traces = cycle(3)
    for trace in traces:
        sent(trace, "allreduce", 500, 502, [0, 1], "norm")
    job = break_down([written(tmp_path, trace, base_us=5 * trace.rank) for trace in traces])
    assert skews(job) == [pytest.approx(0.007), 0]


def test_a_sender_may_be_done_before_the_receiver_begins(tmp_path):
    first, last = ranks_of(2)
    sent(first, "send", 200, 210, [0, 1]), sent(last, "recv", 400, 410, [0, 1])
    paths = [written(tmp_path, trace) for trace in (first, last)]
    assert skews(break_down(paths)) == [0.01, 0]
    # nothing arrives before it is sent
    job = break_down([paths[0], written(tmp_path, last, base_us=-300)])
    assert skews(job) == [None, None]


@pytest.mark.parametrize("launch", [False, True])
def test_work_without_a_launch_counts_with_what_ran_before_it(tmp_path, launch):
    trace = MadeTrace(0).label("ProfilerStep#1", 0, 1000)
    if launch:  # calls that launch nothing have no number, either
        trace.add("cuda_runtime", "hipGetDevice", 1, 2, 1, HOST, correlation=0)
    trace.operator("aten::mm", 10, 20).kernel(30, 130, launched=15)
    trace.operator(NODE, 40, 60, AUTOGRAD).kernel(130, 330, launched=45, thread=AUTOGRAD)
    kernel, stream = "ncclDevKernel_Generic(ncclDevComm*)", (trace.device, NCCL_STREAM)
    trace.add("kernel", kernel, 300, 400, *stream, correlation=0)
    trace.label("Optimizer.step#SGD.step", 70, 90).kernel(420, 500, launched=80)
    job = break_down([written(tmp_path, trace)])
    (step,) = job.steps
    assert (step.forward_comm_ms, step.update_comm_ms) == (0, 0)
    assert step.backward_comm_ms == pytest.approx(0.1)
    assert any("1 of 4 kernels and copies have no launch" in note for note in job.notes)


def test_a_kernel_ends_where_the_next_one_of_its_stream_begins(tmp_path):
    trace = MadeTrace(0).label("ProfilerStep#1", 0, 1000)
    for start, end in ((10, 3_000_000), (30, 40), (60, 80)):
        trace.kernel(start, end, launched=5)
    job = break_down([written(tmp_path, trace)])
    assert job.steps[0].compute_ms == pytest.approx(0.05)
    assert any("1 of 3 kernels and copies last beyond the next one" in n for n in job.notes)


def test_what_a_record_names_is_a_collective_whatever_moves_it(tmp_path):
    trace = MadeTrace(0).label("ProfilerStep#1", 0, 1000).kernel(10, 20, launched=5)
    reported = {"Collective name": "allreduce"}
    trace.launch("kernel", "sycl_ring_kernel", 30, 50, NCCL_STREAM, 6, HOST, **reported)
    copy = {"Collective name": "_allgather_base"}
    trace.launch("gpu_memcpy", "Memcpy PtoP", 60, 70, NCCL_STREAM, 7, HOST, **copy)
    (step,) = break_down([written(tmp_path, trace)]).steps
    expected = {"collective:all_gather": 0.01, "collective:all_reduce": 0.02}
    assert step.comm_ms_by_op == pytest.approx(expected)
    assert step.copy_ms == 0


def test_no_finite_number_is_null_in_merged_traces(tmp_path):
    trace = MadeTrace(0).operator("aten::mm", 0, 9)
    trace.events[0]["args"] |= {"loss": float("nan"), "norms": [float("inf"), 1.0]}
    merge_traces([trace.write(tmp_path / "0.json")], tmp_path / "merged.json.gz")
    text = gzip.decompress((tmp_path / "merged.json.gz").read_bytes()).decode()

    def refuse(word):
        raise AssertionError(word)

    (event,) = json.loads(text, parse_constant=refuse)["traceEvents"]
    assert (event["args"]["loss"], event["args"]["norms"]) == (None, [None, 1.0])
