"""Traces of devices that nobody labelled, and what is unknown of them."""

import gzip
import json

import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.job import break_down
from shardlab.profiling.table import UNKNOWN, render
from tests.profiling.nccl_trace_factory import AUTOGRAD, MadeTrace
from tests.trace_factory import event, label, write_rank

NODE = "autograd::engine::evaluate_function: AddmmBackward0"
RCCL = "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"


def rocm_ranks(steps=2, rank=0, annotated=True, late=0):
    """Steps that the CPU launches in 100 us each; the device takes 1000 us for each."""
    trace = MadeTrace(rank)
    # launched before the trace began
    trace.add("kernel", "Cijk_gemm", 0, 500, trace.device, 7, correlation=1)
    for i in range(steps):
        cpu, gpu = 100 * i, 500 + 1000 * i
        if annotated:
            trace.label(f"ProfilerStep#{i + 5}", cpu, cpu + 100)
        trace.label("Optimizer.zero_grad#SGD.zero_grad", cpu + 1, cpu + 5)
        trace.operator("aten::linear", cpu + 10, cpu + 30)
        trace.kernel(gpu, gpu + 300, launched=cpu + 20, name="Cijk_gemm")
        trace.kernel(gpu + 300, gpu + 350, cpu + 25, name="__amd_rocclr_copyBuffer")
        trace.operator(NODE, cpu + 40, cpu + 50, AUTOGRAD)
        trace.kernel(gpu + 350, gpu + 800, cpu + 45, name="Cijk_gemm", thread=AUTOGRAD)
        trace.operator("aten::mul", cpu + 42, cpu + 48, AUTOGRAD)
        trace.operator("c10d::allreduce_", cpu + 51, cpu + 53, AUTOGRAD)
        trace.operator(NODE, cpu + 50, cpu + 60, AUTOGRAD)
        trace.nccl(gpu + 600 + late, gpu + 900, cpu + 55, "Generic", AUTOGRAD, "allreduce")
        kernel = next(e for e in trace.events[::-1] if e["cat"] == "kernel")
        kernel["name"] = RCCL
        trace.label("Optimizer.step#SGD.step", cpu + 70, cpu + 90)
        trace.kernel(gpu + 900, gpu + 950, launched=cpu + 80, name="multi_tensor_apply")
    return trace


def test_a_device_runs_steps_behind_the_cpu(tmp_path):
    for annotated in (True, False):
        path = rocm_ranks(annotated=annotated).write(tmp_path / f"{annotated}.json")
        first, second = break_down([path]).steps
        assert (first.step, second.step) == ((5, 6) if annotated else (1, 2))
        # the second one begins where the work of the first has ended
        assert (first.step_ms, second.step_ms) == pytest.approx((0.95, 1.0))
        for step in (first, second):
            assert (step.forward_ms, step.optimizer_ms) == pytest.approx((0.35, 0.05))
            assert step.backward_ms == pytest.approx(0.55)
            assert step.backward_compute_ms == pytest.approx(0.45)
            assert step.comm_ms_by_op == pytest.approx({"nccl:all_reduce": 0.3})
            assert step.copy_ms_by_kind == pytest.approx({"unknown": 0.05})
            parts = step.compute_ms + step.exposed_comm_ms + step.exposed_copy_ms + step.idle_ms
            assert parts == pytest.approx(step.step_ms)


def test_gap_with_operators_separates_backward_passes(tmp_path):
    """Two micro-batches in one step, and nothing that says where steps end."""
    events = []
    for i in range(2):
        events += [event("aten::mm", 100 * i, 100 * i + 30)]
        for start in (40, 60):
            events += [event(NODE, 100 * i + start, 100 * i + start + 10)]
            events += [event("aten::mm", 100 * i + start + 1, 100 * i + start + 9)]
    job = break_down([write_rank(tmp_path / "0.json", events)])
    assert [(s.forward_ms, s.backward_ms) for s in job.steps] == [
        (pytest.approx(0.04), pytest.approx(0.03))
    ] * 2
    assert "each ends with a backward pass" in job.notes[0]
    labelled = [label("ProfilerStep#1", 0, 200), *events]
    (step,) = break_down([write_rank(tmp_path / "0.json", labelled)]).steps
    assert (step.forward_ms, step.backward_ms) == pytest.approx((0.08, 0.06))


def test_ranks_are_matched_in_any_order_of_files(tmp_path):
    ranks = [rocm_ranks(rank=rank, late=40 * rank).write(tmp_path / f"{rank}") for rank in (0, 1)]
    # the second trace counts from a base that is 7 us later
    trace = json.loads(ranks[1].read_text())
    trace["baseTimeNanoseconds"] += 7000
    trace["traceEvents"] = [{**e, "ts": e["ts"] - 7} for e in trace["traceEvents"]]
    ranks[1].write_text(json.dumps(trace))
    for paths in (ranks, ranks[::-1]):
        steps = break_down(paths).steps
        assert [(s.rank, s.step) for s in steps] == [(0, 5), (0, 6), (1, 5), (1, 6)]
        assert [s.comm_skew_ms for s in steps] == pytest.approx([0.04, 0.04, 0, 0])


MISSING = {
    "skew, transfer: unknown: 1 of 2 ranks given": rocm_ranks(),
    "steps: 1 of 11 kernels and copies were launched before the trace": rocm_ranks(),
    "each ends with Optimizer.step#SGD.step": rocm_ranks(annotated=False),
    "no ProfilerStep in the trace: the whole trace is one": MadeTrace().operator("aten::mm", 0, 9),
    "backward, update: unknown: no operator of the autograd engine": MadeTrace().kernel(0, 9, 0),
    "communication: unknown: 1 calls": MadeTrace().operator("c10d::allreduce_", 0, 9),
    "compute: of the CPU only": MadeTrace()
    .operator("aten::mm", 0, 9)
    .add("cuda_runtime", "cudaLaunchKernel", 1, 2, 1, 1, correlation=1),
    "4 timed events of unknown categories or times (Other, kernel at 0, xpu_op) are": MadeTrace()
    .operator("aten::mm", 0, 9)
    .add("kernel", "gemm", 0, 0, 0, 7)
    .add("Other", "a", 0, 1, 1, 1)
    .add("xpu_op", "b", 0, 1, 1, 1)
    .add("xpu_op", "b", 0, 1, 1, 1)
    .add("Trace", "PyTorch Profiler (0)", 0, 1, "Spans", 1),
    "1 of 2 kernels and copies have no launch": MadeTrace()
    .kernel(0, 9, 0)
    .add("kernel", "gemm", 10, 12, 0, 7, correlation=1),
}


def test_a_group_that_was_not_initialized_has_no_size(tmp_path):
    path = rocm_ranks().write(tmp_path / "0.json")
    trace = json.loads(path.read_text())
    trace["distributedInfo"] |= {"rank": -1, "world_size": -1}
    path.write_text(json.dumps(trace))
    job = break_down([path])
    assert any("1 of an unknown number of ranks given" in note for note in job.notes)
    assert {(step.rank, step.comm_skew_ms) for step in job.steps} == {(0, None)}


@pytest.mark.parametrize("note", MISSING)
def test_what_is_unknown_is_noted(note, tmp_path):
    notes = break_down([MISSING[note].write(tmp_path / "0.json")]).notes
    assert any(note in text for text in notes), notes


def changed(path, **header):
    """The trace at a path with other values in its header; None takes one away."""
    trace = json.loads(path.read_text()) | header
    path.write_text(json.dumps({key: value for key, value in trace.items() if value is not None}))
    return path


def unnumbered(trace, path, late_us=0):
    """A trace of a job whose ranks no group numbers."""
    base = 1_000_000_000_000 + 1000 * late_us
    return changed(trace.write(path), distributedInfo=None, baseTimeNanoseconds=base)


def test_unknown_times_are_no_numbers_and_text_is_printable(tmp_path):
    trace = MadeTrace().kernel(0, 9, 0).copy(10, 20, 1, name="Memcpy \x1b")
    trace.nccl(0, 9, 0, "Generic", reported="\x1b[2J\n\u202e" + "x" * 1000)
    trace.label("Optimizer.step#\x1b]0;\n", 30, 40)
    paths = [unnumbered(trace, tmp_path / f"{late}.json", late) for late in (0, 1)]
    job = break_down(paths)
    (step,) = job.steps[1:]
    assert (step.rank, step.forward_ms, step.update_ms) == (1, None, None)
    lines = list(render(job))
    assert all(line.isprintable() and len(line) < 400 for line in lines)
    for text in (f"  {UNKNOWN}  ", "1.json does not say its rank", "nccl:\\x1b"):
        assert any(text in line for line in lines)


def test_ranges_may_bear_another_number_of_the_same_process(tmp_path):
    """As in a container, where profiler and operating system count processes apart."""
    trace = rocm_ranks()
    expected = break_down([trace.write(tmp_path / "0.json")])
    for entry in trace.events:
        if entry["name"].startswith("ProfilerStep#"):
            entry["pid"] = entry["tid"] = 3100453
    assert break_down([trace.write(tmp_path / "1.json")]) == expected


def test_categories_count_in_any_case(tmp_path):
    """As torch up to 1.12 wrote them."""
    old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
    trace = rocm_ranks()
    expected = break_down([trace.write(tmp_path / "new.json")])
    for entry in trace.events:
        entry["cat"] = old.get(entry["cat"], entry["cat"])
    assert break_down([trace.write(tmp_path / "old.json")]) == expected


def test_fragments_of_steps_do_not_enter_the_means_of_whole_ones(tmp_path):
    """The trace ends just after the third step began; the device never begins its work."""
    trace = rocm_ranks().label("ProfilerStep#7", 200, 204).operator("aten::mm", 201, 203)
    job, complete = (
        break_down([trace.write(tmp_path / "1.json")]),
        rocm_ranks().write(tmp_path / "2"),
    )
    assert job.steps == break_down([complete]).steps
    assert any("1 of 3 left out" in note and note.endswith(": 7") for note in job.notes)
    assert any(line.split()[:3] == ["0", "2", "0.975"] for line in render(job))


def test_an_optimizer_in_some_of_the_steps_is_said(tmp_path):
    trace = rocm_ranks()
    trace.events = [e for e in trace.events if e["name"][:9] != "Optimizer" or e["ts"] < 100]
    notes = break_down([trace.write(tmp_path / "0.json")]).notes
    assert "rank 0: optimizer: in 1 of 2 steps: their mean is shown" in notes


@pytest.mark.parametrize("cycle", [False, True])
def test_traces_that_others_joined_are_refused(tmp_path, cycle):
    """Ranks with a process number each, or two cycles with equal numbers of steps."""
    first, second = rocm_ranks(), rocm_ranks()
    for entry in second.events:
        entry["ts"] += 2500 if cycle else 0
        entry["pid"] += 0 if cycle else 1000
    first.events += second.events
    words = "ProfilerStep#5 occurs twice" if cycle else r"2 processes \(4700, 5700\)"
    with pytest.raises(UserError, match=words):
        break_down([first.write(tmp_path / "0.json")])


def test_copies_of_a_trace_count_once_and_are_said(tmp_path):
    ranks = [rocm_ranks(rank=rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)]
    expected = break_down(ranks)
    assert break_down([*ranks, ranks[0], tmp_path]) == expected
    (tmp_path / "0 (1).json").write_bytes(ranks[0].read_bytes())
    (tmp_path / "1.json.gz").write_bytes(gzip.compress(ranks[1].read_bytes()))
    job = break_down([tmp_path])
    assert job.steps == expected.steps
    notes = [note for note in job.notes if "has its events" in note]
    assert [note.split()[:2] for note in notes] == [["rank", "0:"], ["rank", "1:"]]
    for note, names in zip(notes, (("0 (1).json", "0.json"), ("1.json.gz", "1.json")), strict=True):
        assert all(str(tmp_path / name) in note for name in names)


def test_traces_of_two_runs_are_refused_and_name_both(tmp_path):
    ranks = [rocm_ranks(rank=rank).write(tmp_path / f"{rank}.json") for rank in (0, 1)]
    again = changed(rocm_ranks().write(tmp_path / "0b.json"), baseTimeNanoseconds=61_000_000_000)
    changed(ranks[0], baseTimeNanoseconds=1_000_000_000)
    changed(ranks[1], baseTimeNanoseconds=1_000_000_000)
    words = r"0b\.json: rank 0 is also in .*/0\.json, and this is not a later part of it \(begun 60"
    for paths in ([tmp_path], [*ranks, again]):
        with pytest.raises(UserError, match=words):
            break_down(paths)
    # other steps, but by another process
    later = rocm_ranks(steps=3)
    later.events = [e for e in later.events if e["ts"] >= 1500 or "Optimizer" in e["name"]]
    later.label("ProfilerStep#9", 0, 3500)
    for entry in later.events:
        entry["pid"] = 9 if entry["pid"] == 4700 else entry["pid"]
    changed(later.write(again), baseTimeNanoseconds=61_000_000_000)
    with pytest.raises(UserError, match=words):
        break_down([tmp_path])


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        (({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 4}), "of 4 ranks, .* one of 2"),
        (({"rank": 0, "world_size": 2}, {"rank": 2, "world_size": 2}), "rank 2 of a job of 2"),
        (({"rank": 0, "world_size": 2}, {}, {}), r"rank 2 of a job of 2 .*: leave out"),
    ],
)
def test_more_ranks_than_the_job_has_are_refused(tmp_path, jobs, words):
    for number, job in enumerate(jobs):
        trace = rocm_ranks(late=number)
        changed(trace.write(tmp_path / f"{number}.json"), distributedInfo=job)
    with pytest.raises(UserError, match=words):
        break_down([tmp_path])


def test_parts_of_a_rank_without_labels_are_steps_of_it(tmp_path):
    """As by a profiler around each step, which leaves one file each."""
    for part in range(3):
        path = rocm_ranks(steps=1, annotated=False).write(tmp_path / f"{part}.json")
        changed(path, baseTimeNanoseconds=1_000_000_000 * (1 + part))
    job = break_down([tmp_path])
    assert [step.rank for step in job.steps] == [0, 0, 0]
    assert {step.step_ms for step in job.steps} == {job.steps[0].step_ms}
    assert sum("are taken as later steps of its run" in note for note in job.notes) == 2
