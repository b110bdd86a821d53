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
def test_two_simulators_agree_where_nothing_is_shared(tasks):
    spans = simulate(tasks, Rank())
    assert {name: span.end for name, span in spans.items()} == pytest.approx(recurrence(tasks))


@given(task_lists(ANY), st.floats(0.2, 4), st.floats(0.1, 10))
def test_a_step_is_never_shorter_than_a_lane_or_a_resource_nor_longer_than_all(tasks, cores, rate):
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
def test_what_comes_one_after_another_takes_longer_with_more_bytes(sizes, rate, factor):
    def seconds(times):
        tasks = [Task(f"{i}", "one", (Phase(0.5, times * n),)) for i, n in enumerate(sizes)]
        return duration(simulate(tasks, Rank(1.0, rate)))

    assert seconds(factor) >= seconds(1.0) - 1e-9


def test_two_threads_share_a_core_and_two_streams_a_link():
    tasks = [Task("a", "compute", (Phase(2.0),)), Task("b", "gather", (Phase(1.0),))]
    assert simulate(tasks, Rank(1.0))["b"].end == pytest.approx(2.0)
    assert duration(simulate(tasks, Rank(2.0))) == pytest.approx(2.0)
    tasks = [Task("a", "gather", (Phase(0, 10),)), Task("b", "reduce", (Phase(0, 30),))]
    spans = simulate(tasks, Rank(bytes_per_second=10))
    assert spans["a"].end == pytest.approx(2.0)
    assert spans["b"].end == pytest.approx(4.0)


def test_a_bucket_lets_bytes_pass_at_once_and_fills_again():
    rank = Rank(bytes_per_second=10, bucket_bytes=20)
    first, second = Task("a", "one", (Phase(0, 50),)), Task("b", "one", (Phase(0, 50),))
    assert duration(simulate([first, second], rank)) == pytest.approx(3 + 5)
    pause = Task("c", "one", (Phase(1.0),))
    assert duration(simulate([first, pause, second], rank)) == pytest.approx(3 + 1 + 4)
    longer = pause._replace(phases=(Phase(100.0),))
    assert duration(simulate([first, longer, second], rank)) == pytest.approx(3 + 100 + 3)


def test_without_a_link_bytes_take_no_time():
    tasks = [Task("a", "one", (Phase(1.0, 1e9),))]
    assert duration(simulate(tasks, Rank(bytes_per_second=math.inf))) == pytest.approx(1.0)


def test_nothing_takes_no_time():
    assert duration(simulate([], Rank())) == 0.0


def test_tasks_that_wait_for_each_other_are_a_mistake():
    tasks = [Task("a", "one", (Phase(),), ("b",)), Task("b", "two", (Phase(),), ("a",))]
    with pytest.raises(AssertionError, match="wait for each other"):
        simulate(tasks, Rank())


def test_the_delay_of_a_link_comes_after_the_bytes():
    tasks = [Task("a", "one", (Phase(1.0, 10, 0.5),))]
    assert duration(simulate(tasks, Rank(bytes_per_second=5))) == pytest.approx(2.5)
