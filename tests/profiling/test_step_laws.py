"""Laws of the breakdown, for any steps of any ranks."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.profiling.breakdown import step_times
from shardlab.profiling.events import EVENT, Group
from shardlab.profiling.intervals import merge
from shardlab.profiling.trace import Trace

STEP = np.array([[0.0, 300.0]])
PIECES = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200)), max_size=8)


def times(pieces):
    pairs = np.array([(start, start + duration) for start, duration in sorted(pieces)], dtype=float)
    return pairs.reshape(-1, 2)


@st.composite
def work(draw):
    start, end = times(draw(PIECES)).T
    events = np.zeros(len(start), EVENT)
    events["start"], events["end"] = start, end
    events["launched"] = start - draw(st.integers(0, 100))
    events["name"] = events["unit"] = [draw(st.sampled_from("ab")) for _ in start]
    for row in range(len(events)):
        events["group"][row] = Group()
    return events


@st.composite
def traces(draw):
    middle = draw(st.integers(20, 250))
    return Trace(
        steps={1: STEP},
        forward=np.array([[10.0, middle]]),
        backward=np.array([[float(middle), 280.0]]),
        kernels=draw(work()),
        copies=draw(work()),
        collectives=draw(work()),
        on_cpu=merge(times(draw(PIECES))),
        on_device=draw(st.booleans()),
    )


@settings(max_examples=30, deadline=None)
@given(traces())
def test_parts_of_a_step_sum_to_the_step(trace):
    (t,) = step_times({0: trace})
    assert t.compute_ms + t.exposed_comm_ms + t.exposed_copy_ms + t.idle_ms == pytest.approx(0.3)
    assert t.forward_ms + t.backward_ms + t.update_ms == pytest.approx(0.3)
    assert t.exposed_comm_ms <= t.comm_ms and t.exposed_copy_ms <= t.copy_ms
    assert sum(t.comm_ms_by_unit.values()) >= t.comm_ms - 1e-9


@settings(max_examples=20, deadline=None)
@given(st.lists(traces(), min_size=2, max_size=4))
def test_skew_and_transfer_are_parts_of_communication_in_any_order_of_ranks(ranks):
    def waits(ranks):
        steps = step_times(dict(enumerate(ranks)))
        return [(t.comm_skew_ms, t.comm_transfer_ms, t.comm_ms) for t in steps]

    assert waits(ranks[1:] + ranks[:1]) == waits(ranks)[1:] + waits(ranks)[:1]
    for skew, transfer, comm in waits(ranks):
        assert skew >= 0 and transfer >= 0 and skew + transfer <= comm + 1e-9
    assert waits(ranks[:1])[0][0] == 0


@settings(max_examples=20, deadline=None)
@given(traces(), st.integers(0, 50))
def test_skew_and_transfer_sum_to_communication_if_all_collectives_match(trace, delay):
    inside = trace.collectives[trace.collectives["start"] < 240]
    late = inside.copy()
    late["start"] = np.minimum(inside["start"] + delay, inside["end"])
    ranks = [replace(trace, collectives=moved) for moved in (inside, late)]
    for t in step_times(dict(enumerate(ranks))):
        assert t.comm_skew_ms + t.comm_transfer_ms == pytest.approx(t.comm_ms)
