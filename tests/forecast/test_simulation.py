import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.forecast.schedule import Phase, Rank, Task, duration, simulate

LANES = ("compute", "gather", "reduce")
SECONDS = st.floats(0, 10)


@st.composite
def task_lists(draw, phases):
    """Tasks in three lanes, each after some earlier ones."""
    tasks = []
    for number in range(draw(st.integers(1, 12))):
        after = (
            draw(st.lists(st.sampled_from([task.name for task in tasks]), max_size=3))
            if tasks
            else []
        )
        chosen = tuple(draw(st.lists(phases, min_size=1, max_size=3)))
        tasks.append(Task(f"task{number}", draw(st.sampled_from(LANES)), chosen, tuple(after)))
    return tasks


WAITS = st.builds(lambda seconds: Phase(wait=seconds), SECONDS)
ANY = st.builds(Phase, SECONDS, SECONDS, SECONDS)


def recurrence(tasks):
    """The second simulator: where nothing is shared, a task starts with the last it waits for."""
    ends, lanes = {}, {}
    for task in tasks:
        start = max([lanes.get(task.lane, 0.0), *(ends[name] for name in task.after)])
        ends[task.name] = lanes[task.lane] = start + sum(phase.wait for phase in task.phases)
    return ends


@given(task_lists(WAITS))
def test_simulation_without_shared_resources_matches_the_recurrence(tasks):
    spans = simulate(tasks, Rank())
    assert {name: span.end for name, span in spans.items()} == pytest.approx(recurrence(tasks))


@given(task_lists(ANY), st.floats(0.2, 4), st.floats(0.1, 10))
def test_step_is_bounded_by_lanes_resources_and_their_sum(tasks, cores, rate):
    rank = Rank(cores, rate)
    found = duration(simulate(tasks, rank))
    phases = [phase for task in tasks for phase in task.phases]
    speed = min(1.0, cores)
    alone = [max(p.cpu / speed, p.nbytes / rate) + p.wait for p in phases]
    lanes = [
        sum(
            max(p.cpu / speed, p.nbytes / rate) + p.wait
            for t in tasks
            if t.lane == lane
            for p in t.phases
        )
        for lane in LANES
    ]
    computing = sum(p.cpu for p in phases) / min(cores, len(LANES))
    sending = sum(p.nbytes for p in phases) / rate
    shared = sum(p.cpu / speed + p.nbytes / rate + p.wait for p in phases)
    slack = 1e-6
    assert found >= max(*lanes, computing, sending) - slack
    assert found <= shared + slack
    if len({task.lane for task in tasks}) == 1:
        assert found == pytest.approx(sum(alone), abs=slack)


@given(st.lists(SECONDS, min_size=1, max_size=6), st.floats(0.1, 10), st.floats(1, 3))
def test_consecutive_tasks_take_longer_with_more_bytes(sizes, rate, factor):
    def seconds(times):
        tasks = [Task(f"{i}", "one", (Phase(0.5, times * n),)) for i, n in enumerate(sizes)]
        return duration(simulate(tasks, Rank(1.0, rate)))

    assert seconds(factor) >= seconds(1.0) - 1e-9


def test_concurrent_tasks_share_a_core_or_a_link():
    tasks = [Task("a", "compute", (Phase(2.0),)), Task("b", "gather", (Phase(1.0),))]
    assert simulate(tasks, Rank(1.0))["b"].end == pytest.approx(2.0)
    assert duration(simulate(tasks, Rank(2.0))) == pytest.approx(2.0)
    tasks = [Task("a", "gather", (Phase(0, 10),)), Task("b", "reduce", (Phase(0, 30),))]
    spans = simulate(tasks, Rank(bytes_per_second=10))
    assert spans["a"].end == pytest.approx(2.0)
    assert spans["b"].end == pytest.approx(4.0)


def test_token_bucket_passes_a_burst_and_refills():
    rank = Rank(bytes_per_second=10, bucket_bytes=20)
    first, second = Task("a", "one", (Phase(0, 50),)), Task("b", "one", (Phase(0, 50),))
    assert duration(simulate([first, second], rank)) == pytest.approx(3 + 5)
    pause = Task("c", "one", (Phase(1.0),))
    assert duration(simulate([first, pause, second], rank)) == pytest.approx(3 + 1 + 4)
    longer = pause._replace(phases=(Phase(100.0),))
    assert duration(simulate([first, longer, second], rank)) == pytest.approx(3 + 100 + 3)


def test_cyclic_dependencies_are_refused():
    tasks = [Task("a", "one", (Phase(),), ("b",)), Task("b", "two", (Phase(),), ("a",))]
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(tasks, Rank())


@pytest.mark.parametrize(
    ("phases", "rate", "seconds"),
    [
        ((), math.inf, 0.0),
        ((Phase(1.0, 1e9),), math.inf, 1.0),
        ((Phase(1.0, 10, 0.5),), 5.0, 2.5),  # the delay follows the bytes
    ],
)
def test_duration_of_a_single_task(phases, rate, seconds):
    assert duration(simulate([Task("a", "one", phases)], Rank(bytes_per_second=rate))) == seconds
