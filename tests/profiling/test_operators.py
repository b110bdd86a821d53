"""Operators reduced one by one give what a pass over all of them gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.profiling import operators
from shardlab.profiling.intervals import EMPTY
from shardlab.profiling.operators import Operators, OutOfOrder

EVER = np.array([[-np.inf, np.inf]])


@st.composite
def nested(draw, first=0, last=400, depth=0):
    """Events of one thread in the order of their start: start, end, whether it computes."""
    found, now = [], first
    while now < last - 1 and draw(st.booleans()):
        start = draw(st.integers(now, last - 1))
        end = draw(st.integers(start + 1, last))
        found.append((float(start), float(end), draw(st.booleans())))
        if depth < 3:
            found += draw(nested(start, end, depth + 1))
        now = end
    return found


def directly(events):
    """The definition: every operator that holds no other kind of event."""
    covered = np.zeros(401, dtype=bool)
    for start, end, computes in events:
        inner = any(start <= s and e <= end for s, e, c in events if not c)
        if computes and not inner:
            covered[int(start) : int(end)] = True
    return covered


def reduced(events, at=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "_EVENTS", at or 1 << 12)
        found = Operators(patient=at is None)
        for one in events:
            found.add(*one)
        found.finish()
    return found


@given(nested(), st.integers(1, 8))
def test_operators_compute_unless_they_contain_other_events(events, at):
    for found in (reduced(events), reduced(events, at)):
        covered = np.zeros(401, dtype=bool)
        for start, end in found.compute(EVER):
            covered[int(start) : int(end)] = True
        assert (covered == directly(events)).all()


@given(nested(), st.integers(0, 400), st.integers(0, 400))
def test_compute_is_clipped_to_the_window(events, a, b):
    window = np.array([[min(a, b), max(a, b)]]) if a != b else EMPTY
    shown = sum(end - start for start, end in reduced(events, 3).compute(window))
    assert shown == directly(events)[min(a, b) : max(a, b)].sum()


def test_patient_reader_accepts_any_order():
    events = [(float(i), i + 0.5, True) for i in range(100)]
    with pytest.raises(OutOfOrder):
        reduced(events[::-1], at=10)
    assert (reduced(events[::-1]).compute(EVER) == reduced(events, at=10).compute(EVER)).all()
