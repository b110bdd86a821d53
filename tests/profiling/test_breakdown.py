import pytest

from shardlab.core.errors import UserError
from shardlab.profiling.breakdown import analyse, read_steps
from shardlab.profiling.merge import merge_traces
from tests.trace_factory import WORKER, WORKER_2, event, label, step, write_rank


def merged(tmp_path, *ranks):
    paths = [
        write_rank(tmp_path / f"{rank}.json", events, rank) for rank, events in enumerate(ranks)
    ]
    merge_traces(paths, tmp_path / "trace.json.gz")
    return tmp_path / "trace.json.gz"


NO_COMPUTE = (
    "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad",
    "c10d::allreduce_",
    "_c10d_functional::wait_tensor",
)
STEPS = {
    "overlapped, exposed and idle time are separated": (
        [
            event("aten::mm", 100, 400),
            label("gloo:all_reduce", 300, 600, WORKER),
            event("aten::add", 700, 800),
        ],
        {
            "step_ms": 1.0,
            "compute_ms": 0.4,
            "comm_ms": 0.3,
            "exposed_comm_ms": 0.2,
            "idle_ms": 0.4,
            "backward_ms": 0.5,
            "backward_comm_ms": 0.1,
        },
    ),
    "wrappers of a blocking collective are not compute": (
        [
            event("autograd::engine::evaluate_function: AddmmBackward0", 0, 900),
            event("AddmmBackward0", 10, 890),
            event("aten::addmm", 20, 120),
            event("aten::mm", 30, 110),
            label("FSDP::post_backward_reduce", 200, 800),
            event("c10d::_reduce_scatter_base_", 210, 230),
            label("gloo:all_reduce", 220, 790, WORKER),
        ],
        {"exposed_comm_ms": 0.57, "comm_ms": 0.57, "compute_ms": 0.1},
    ),
    "an operator that holds a wrapper is not compute, one beside it is": (
        [
            event("custom::layer", 0, 500),
            event("custom::layer", 100, 400),
            event("c10d::send", 200, 300),
            event("aten::mm", 120, 190),
            event("aten::mm", 310, 320),
        ],
        {"compute_ms": 0.08},
    ),
    **{
        f"{wrapper} waits, which is not compute": (
            [event(wrapper, 0, 900), label("gloo:all_reduce", 100, 800, WORKER)],
            {"compute_ms": 0, "exposed_comm_ms": 0.7},
        )
        for wrapper in NO_COMPUTE
    },
    "operators on threads of gloo are not compute": (
        [
            label("gloo:all_reduce", 100, 500, WORKER),
            event("aten::add_", 200, 300, WORKER),
            event("aten::copy_", 600, 700, WORKER),
        ],
        {"compute_ms": 0},
    ),
    "concurrent collectives count once in the total and each by operation": (
        [
            label("gloo:all_reduce", 100, 500, WORKER),
            label("gloo:all_gather", 300, 700, WORKER_2),
            label("gloo:all_gather", 800, 900, WORKER),
        ],
        {"comm_ms": 0.7, "comm_ms_by_op": {"gloo:all_reduce": 0.4, "gloo:all_gather": 0.5}},
    ),
    "the delay of an emulated link is communication of its unit": (
        [
            event("aten::mm", 0, 200),
            label("shardlab::comm h.0", 200, 800),
            label("gloo:recv", 210, 300),
            label("shardlab::link", 300, 790),
        ],
        {"exposed_comm_ms": 0.58, "comm_ms_by_unit": {"h.0": 0.58}},
    ),
    "operations of gloo are matched to calls in order": (
        [
            label("shardlab::comm h.1", 10, 20),
            event("c10d::allreduce_", 12, 15),
            label("FSDP::post_backward_reduce (h.0)", 30, 40),
            event("c10d::_reduce_scatter_base_", 32, 35),
            label("gloo:all_reduce", 100, 300, WORKER),
            label("gloo:all_reduce", 150, 400, WORKER_2),
            label("gloo:broadcast", 500, 510, WORKER),
        ],
        {"comm_ms_by_unit": {"h.1": 0.2, "h.0": 0.25, "other": 0.01}},
    ),
    "the innermost label names the unit": (
        [
            label("FSDP::all_gather", 10, 100),
            label("gloo:send", 20, 30),
            label("shardlab::comm h.0@nodes", 40, 90),
            label("gloo:send", 50, 70),
            label("FSDP::all_gather (h.1) [pg=4]", 120, 150),
            label("gloo:send", 130, 140),
            label("FSDP::pre_forward (h.2)", 160, 200),
            label("gloo:send", 170, 175),
        ],
        {"comm_ms_by_unit": {"root": 0.01, "h.0@nodes": 0.02, "h.1": 0.01, "other": 0.005}},
    ),
}


@pytest.mark.parametrize(("events", "expected"), STEPS.values(), ids=STEPS)
def test_a_step_is_divided(tmp_path, events, expected):
    (times,) = read_steps(merged(tmp_path, [*step(1, 0, 1000), *events]))
    assert {name: getattr(times, name) for name in expected} == {
        name: pytest.approx(value) for name, value in expected.items()
    }


def test_neighbours_are_distinguished_at_large_times(tmp_path):
    """Times of this size have no digits left for nanoseconds: neighbours seem to overlap."""
    start = now = 4_379_783_536_780_984
    events = []
    for i in range(200):
        for name, nanoseconds in (("aten::mm", 4001 + 37 * i), ("c10d::allreduce_", 1003)):
            events.append({**event(name, now / 1000, 0), "dur": nanoseconds / 1000})
            now += nanoseconds
    for name in ("ProfilerStep#1", "shardlab::backward"):
        events.append(label(name, start / 1000, now / 1000))
    (times,) = read_steps(write_rank(tmp_path / "0.json", events))
    assert times.step_ms - times.compute_ms == pytest.approx(200 * 1003e-6, rel=1e-3)


def test_events_may_come_in_any_order(tmp_path):
    events = [event(f"aten::op{i % 7}", 10 * i, 10 * i + 3 + i % 5) for i in range(100)]
    events += [event("c10d::send", 10 * i + 1, 10 * i + 2) for i in range(0, 100, 9)]
    events += step(1, 0, 1000)
    in_order = sorted(events, key=lambda e: e["ts"])
    # of one rank's own trace, too
    unmerged = write_rank(tmp_path / "1.json", events[::-1])
    assert analyse(merged(tmp_path, in_order)) == analyse(unmerged)


def test_events_across_steps_are_split_at_the_border(tmp_path):
    events = [
        *step(1, 0, 1000),
        *step(2, 1100, 2100),
        label("gloo:all_reduce", 900, 1400, WORKER),
    ]
    first, second = read_steps(merged(tmp_path, events))
    assert (first.comm_ms, second.comm_ms) == pytest.approx((0.1, 0.3))


def test_the_breakdown_is_the_mean_over_steps_and_ranks(tmp_path):
    ranks = [
        [*step(1, 0, 1000), event("aten::mm", 0, 500), label("gloo:all_reduce", 400, 800, WORKER)],
        [*step(1, 0, 3000), event("aten::mm", 0, 1500)],
    ]
    result = analyse(merged(tmp_path, *ranks))
    assert result.profiled_step_ms == pytest.approx(2.0)
    assert result.compute_ms == pytest.approx(1.0)
    assert result.comm_ms_per_step == pytest.approx(0.2)
    assert result.comm_share == pytest.approx(0.4 / 4)
    assert result.overlap == pytest.approx(0.25)
    assert result.exposed_comm_ms == pytest.approx(0.15)
    assert result.idle_ms == pytest.approx((0.2 + 1.5) / 2)
    assert result.backward_comm_share == pytest.approx(0.3 / 2.0)
    silent = analyse(merged(tmp_path, [*step(1, 0, 1000), event("aten::mm", 0, 500)]))
    assert (
        silent.comm_share,
        silent.overlap,
        silent.comm_ms_by_op,
    ) == (0, 0, {})


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([], "no timed events of rank 0"),
        ([event("aten::mm", 0, 1)], "rank 0 has no profiled step"),
        ([label("ProfilerStep#4", 0, 9)], "step 4 of rank 0 has no backward pass"),
    ],
)
def test_an_empty_trace_is_refused_in_one_line(tmp_path, events, message):
    path = merged(tmp_path, events)
    with pytest.raises(UserError, match=message) as refusal:
        analyse(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert "\n" not in str(refusal.value)
