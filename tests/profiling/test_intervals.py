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
