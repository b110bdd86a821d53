"""Learning-rate schedule, and times of steps in collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.train.loop import learning_rate
from tests.ranks import on_ranks
from tests.train.checkpointed import Run, plan_of, strategy_of


@given(steps=st.integers(2, 500), warmup=st.integers(0, 100))
def test_learning_rate_warms_up_and_decays_to_a_tenth(steps, warmup):
    rates = [learning_rate(step, steps, 2.0, warmup) for step in range(steps + warmup + 5)]
    assert all(0 < rate <= 2.0 for rate in rates)
    grow, fall = rates[:warmup], rates[warmup:]
    assert grow == sorted(grow) and fall == sorted(fall, reverse=True)
    assert max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.2)


@given(steps=st.integers(2, 500), warmup=st.integers(0, 100))
def test_constant_learning_rate_stays_at_the_peak(steps, warmup):
    rates = [learning_rate(step, steps, 2.0, warmup, "constant") for step in range(steps + warmup)]
    assert rates[:warmup] == sorted(rates[:warmup])
    assert set(rates[warmup:]) == {2.0}


@on_ranks(2)
def test_time_in_collectives_is_known_at_the_end_of_a_step(group, data, tmp_path):
    events = Run.start(plan_of(data, strategy_of("fsdp2")), tmp_path, group).to(2).events
    assert all(0 < event.collective_ms <= event.step_ms for event in events)
