import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.profiling.intervals import (
    difference,
    intersection,
    length,
    merge,
    union,
)
from shardlab.profiling.trace import computing

SPAN = 64
RAW = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(sorted), max_size=12).map(
    lambda pairs: np.array(pairs, dtype=float).reshape(-1, 2)
)


def bitmap(intervals):
    seconds = np.zeros(SPAN, dtype=bool)
    for start, end in intervals:
        seconds[int(start) : int(end)] = True
    return seconds


def is_set(intervals):
    bounds = intervals.ravel()
    return intervals.shape[1:] == (2,) and bool((bounds[1:] > bounds[:-1]).all())


@given(RAW)
def test_merging_keeps_exactly_the_time_covered(raw):
    merged = merge(raw)
    assert is_set(merged)
    assert (bitmap(merged) == bitmap(raw)).all()
    assert length(merged) == bitmap(raw).sum()


@pytest.mark.parametrize(
    ("operation", "law"),
    [
        (union, np.logical_or),
        (intersection, np.logical_and),
        (difference, lambda a, b: a & ~b),
    ],
)
@given(a=RAW, b=RAW)
def test_operations_equal_those_of_a_bitmap(operation, law, a, b):
    result = operation(merge(a), merge(b))
    assert is_set(result)
    assert (bitmap(result) == law(bitmap(a), bitmap(b))).all()


@st.composite
def nested(draw, first=0, last=SPAN, depth=0):
    """Events of one thread in the order of their start: start, end, whether it computes."""
    events, now = [], first
    while now < last - 1 and draw(st.booleans()):
        start = draw(st.integers(now, last - 1))
        end = draw(st.integers(start + 1, last))
        events.append((start, end, draw(st.booleans())))
        if depth < 3:
            events += draw(nested(start, end, depth + 1))
        now = end
    return events


@given(nested())
def test_operators_compute_unless_they_contain_other_events(events):
    leaves = [
        (start, end)
        for start, end, computes in events
        if computes and not any(start <= s and e <= end for s, e, c in events if not c)
    ]
    table = np.array(events, dtype=float).reshape(-1, 3)
    assert (bitmap(computing(table[:, :2], table[:, 2] > 0)) == bitmap(leaves)).all()
