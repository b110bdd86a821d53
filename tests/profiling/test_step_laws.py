"""Laws of the breakdown, for any steps of any ranks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.profiling.breakdown import step_times
from shardlab.profiling.intervals import merge
from shardlab.profiling.trace import Collectives, Launched, Trace

STEP = np.array([[0.0, 300.0]])
PIECES = st.lists(st.tuples(st.integers(0, 400), st.integers(1, 200)), max_size=8)


def times(pieces):
    pairs = np.array([(start, start + duration) for start, duration in sorted(pieces)], dtype=float)
    return pairs.reshape(-1, 2)


@st.composite
def launched(draw):
    work = times(draw(PIECES))
    return Launched(work, work[:, 0] - draw(st.integers(0, 100)))


@st.composite
def traces(draw):
    moved = times(draw(PIECES))
    names = [draw(st.sampled_from("ab")) for _ in moved]
    middle = draw(st.integers(20, 250))
    return Trace(
        steps={1: STEP},
        forward=np.array([[10.0, middle]]),
        backward=np.array([[float(middle), 280.0]]),
        kernels=draw(launched()),
        copies=draw(launched()),
        collectives=Collectives(
            moved,
            moved[:, 0],
            np.array(names, dtype=np.str_),
            np.array(names, dtype=np.str_),
        ),
        on_cpu=merge(times(draw(PIECES))),
        on_device=draw(st.booleans()),
    )


@given(traces())
def test_parts_of_a_step_sum_to_the_step(trace):
    (t,) = step_times({0: trace})
    assert t.compute_ms + t.exposed_comm_ms + t.exposed_copy_ms + t.idle_ms == pytest.approx(0.3)
    assert t.forward_ms + t.backward_ms + t.update_ms == pytest.approx(0.3)
    assert t.exposed_comm_ms <= t.comm_ms and t.exposed_copy_ms <= t.copy_ms
    assert sum(t.comm_ms_by_unit.values()) >= t.comm_ms - 1e-9


@settings(max_examples=30, deadline=None)
@given(st.lists(traces(), min_size=2, max_size=4))
def test_skew_and_transfer_are_parts_of_communication(ranks):
    for t in step_times(dict(enumerate(ranks))):
        assert t.comm_skew_ms >= 0 and t.comm_transfer_ms >= 0
        assert t.comm_skew_ms + t.comm_transfer_ms <= t.comm_ms + 1e-9
    (alone,) = step_times({0: ranks[0]})
    assert alone.comm_skew_ms == 0


@settings(max_examples=30, deadline=None)
@given(st.lists(traces(), min_size=2, max_size=4), st.integers(0, 3))
def test_skew_is_invariant_under_permutation_of_ranks(ranks, by):
    def waits(ranks):
        steps = step_times(dict(enumerate(ranks)))
        return [(t.comm_skew_ms, t.comm_transfer_ms, t.comm_ms) for t in steps]

    by %= len(ranks)
    turned, straight = waits(ranks[by:] + ranks[:by]), waits(ranks)
    assert turned == straight[by:] + straight[:by]


@settings(max_examples=30, deadline=None)
@given(traces(), st.lists(st.integers(0, 50), min_size=1, max_size=3))
def test_skew_and_transfer_sum_to_communication_if_all_collectives_match(trace, delays):
    def late(by):
        moved = trace.collectives
        ends = moved.times + np.array([[by, 0]])
        return moved._replace(times=np.minimum(ends, ends[:, 1:]))

    inside = trace.collectives.times[:, 0] < 240
    trace = Trace(**{**vars(trace), "collectives": trace.collectives.only(inside)})
    ranks = [Trace(**{**vars(trace), "collectives": late(by)}) for by in (0, *delays)]
    for t in step_times(dict(enumerate(ranks))):
        assert t.comm_skew_ms + t.comm_transfer_ms == pytest.approx(t.comm_ms)
