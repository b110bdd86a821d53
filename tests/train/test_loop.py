"""Learning rates, times in collectives, operations of a step, and when a run has diverged."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shardlab.train.loop import StepEvent, divergence_step, has_diverged, learning_rate
from shardlab.train.utilization import flops_per_token
from tests.families import config_of
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


@on_ranks(2)
def test_time_in_collectives_is_known_at_the_end_of_a_step(group, data, tmp_path):
    events = Run.start(plan_of(data, strategy_of("fsdp2")), tmp_path, group).to(2).events
    assert all(0 < event.collective_ms <= event.step_ms for event in events)


def events(applied: str, **changes) -> list[StepEvent]:
    """A step for each letter: `+` if it was applied, `-` if it was left out."""
    facts = {"loss": 1.0, "step_ms": 1.0, "learning_rate": 1.0, "gradient_norm": 1.0, "tokens": 1}
    return [
        StepEvent(**{"step": step, "applied": letter == "+", **facts, **changes})
        for step, letter in enumerate(applied)
    ]


@pytest.mark.parametrize(
    ("applied", "loss_scaled", "diverged"),
    [
        *(("", False, False), ("+--", False, False), ("+--+--+", False, False)),
        *(("+---", False, True), ("---", False, True)),
        # the search for the loss scale is no divergence
        *(("-" * 18, True, False), ("-" * 19, True, True)),
    ],
)
def test_a_run_diverges_by_three_steps_in_a_row(applied, loss_scaled, diverged) -> None:
    assert has_diverged(events(applied), loss_scaled) == diverged


@pytest.mark.parametrize(
    ("found", "steps", "step"),
    [
        (events("++-+---"), 20, 4),
        (events("---"), 20, 0),
        (events("++-++--"), 7, None),  # the last steps of a run may be bad batches
        (events("++", loss=math.inf), 2, 0),
        ([*events("++"), *events("++", loss=math.nan)[:1]], 3, 0),
    ],
)
def test_the_step_is_the_first_without_an_update_at_the_end(found, steps, step) -> None:
    assert divergence_step([vars(event) for event in found], steps) == step


@given(st.text(alphabet="+-", min_size=1, max_size=30))
def test_a_run_that_was_stopped_has_a_step(applied: str) -> None:
    found = events(applied)
    stopped = has_diverged(found, loss_scaled=False)
    step = divergence_step([vars(event) for event in found], len(found) + stopped)
    assert (step is not None) == stopped
    if step is not None:
        assert len(found) - step >= 3 and not any(event.applied for event in found[step:])


@pytest.mark.parametrize("family", ["gpt2-tied", "gpt2-untied", "llama-tied", "qwen3-untied"])
def test_flops_formula_matches_the_flop_counter(family):
    length = 32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(family), attn_implementation="eager")
        tokens = torch.zeros(2, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    counted = counter.get_total_flops() / tokens.numel()
    # the formula takes biases and normalisations for matrices, and the first layer's inputs for
    # what has a gradient
    assert flops_per_token(model, length) == pytest.approx(counted, rel=0.03)
