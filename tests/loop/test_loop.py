"""Learning-rate schedule, and times of steps in collectives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.loop.loop import learning_rate
from tests.checkpoint.checkpointed import Run, plan_of, strategy_of
from tests.devices.late_device import late_cpu
from tests.ranks import on_ranks


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


STRATEGIES = {
    "manual": strategy_of("manual", codec="int8"),
    "slide": {"engine": "slide", "param_transfer": "shard", "grad_sync": "gpu_reduce"},
    **{engine: strategy_of(engine) for engine in ("ddp", "fsdp1", "fsdp2")},
}


@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_that_of_a_device_is_known_later_and_nothing_waits_for_it(group, data, tmp_path, name):
    plan = plan_of(data, STRATEGIES[name])
    with late_cpu() as device:
        run = Run.start(plan, tmp_path, group, every=3).to(2)
        assert [event.collective_ms for event in run.events] == [None, None]
        # slide waits for the gradients that it updates host memory with
        assert device.waits == 0 or name == "slide"
        run.to(3)  # a checkpoint waits for the device, and has it all
        assert all(0 < event.collective_ms <= event.step_ms for event in run.events)
        assert Run.start(plan, tmp_path, group).events == run.events
        run.to(4)
        assert run.events[3].collective_ms is None
        device.is_idle = True
        run.to(5)
        assert run.events[3].collective_ms > 0
