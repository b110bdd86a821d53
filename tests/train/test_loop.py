"""Learning rates, times in collectives, operations of a step, and when a run has diverged."""

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from shardlab.core.errors import UserError
from shardlab.data.loader import Batches
from shardlab.data.tokens import open_split
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from shardlab.train.loop import StepEvent, build_loop, divergence_step, has_diverged, learning_rate
from shardlab.train.settings import Train
from shardlab.train.utilization import flops_per_token
from tests.families import config_of
from tests.ranks import on_ranks, run_ranks
from tests.train.checkpointed import Run, plan_of, strategy_of


@given(steps=st.integers(2, 500), warmup=st.integers(0, 100))
def test_learning_rate_warms_up_and_decays_to_a_tenth(steps, warmup):
    rates = [learning_rate(step, steps, 2.0, warmup) for step in range(steps + warmup + 5)]
    assert all(0 < rate <= 2.0 for rate in rates)
    grow, fall = rates[:warmup], rates[warmup:]
    assert grow == sorted(grow) and fall == sorted(fall, reverse=True)
    assert max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.2)


TINY = Model(preset="tiny")
RATES = [0.005, 0.01, 0.01, 0.00775, 0.00325]
"""of five steps: a peak of 0.01 after two steps of warm-up, then the cosine from it to a tenth"""


def written_out(split, betas, rates=RATES, clip=0.5, samples=8):
    """Losses of AdamW as Loshchilov and Hutter (2019, algorithm 2) have it, with clipped gradients,
    weight decay 0.1 and epsilon 1e-8; a step takes all samples at once."""
    model = build_model(TINY, split.vocabulary, 16, split.end_of_text, 3).whole().train()
    parameters = [*model.parameters()]
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    batches, losses = Batches(split, 16, 3), []
    for step, rate in enumerate(rates):
        tokens = batches.batch(step * samples, samples)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(float(loss))
        gradients = torch.autograd.grad(loss, parameters)
        norm = torch.stack([g.norm() for g in gradients]).norm()
        scale = min(1.0, clip / float(norm))
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                m.mul_(betas[0]).add_((1 - betas[0]) * scale * g)
                v.mul_(betas[1]).add_((1 - betas[1]) * (scale * g) ** 2)
                mean = m / (1 - betas[0] ** (step + 1))
                root = (v / (1 - betas[1] ** (step + 1))).sqrt()
                p.mul_(1 - rate * 0.1).sub_(rate * mean / (root + 1e-8))
    return losses


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(2)
def test_five_steps_are_those_of_adamw_written_out(group, data, engine):
    """Two ranks with two micro-batches each: schedule, mean, clipping, decay and both betas."""
    split = open_split(data / "tokens", "train")
    sizes = {"steps": 5, "warmup_steps": 2, "batch_size": 2, "accumulation": 2}
    numbers = {"sequence_length": 16, "learning_rate": 0.01, "weight_decay": 0.1, "clip": 0.5}
    for betas in ((0.9, 0.95), (0.5, 0.6)):
        chosen = {}  # the first are the defaults
        if betas != (0.9, 0.95):
            chosen = {"betas": betas, "batch_size": None, "global_batch_size": 8}
        train = Train(untimed_steps=0, **{**sizes, **numbers, **chosen})
        built = build_loop(TINY, parse_strategy({"engine": engine}), train, split, 3, None, group)
        events = []
        built.loop.run(5, events.append)
        losses = torch.tensor([event.loss for event in events], dtype=torch.float64)
        dist.all_reduce(losses)
        expected = written_out(split, betas)
        assert (losses / 2).tolist() == pytest.approx(expected, rel=1e-5)
        assert [event.learning_rate for event in events] == pytest.approx(RATES)


def by_muon(split, rates=RATES, samples=8):
    """Losses of torch.optim.Muon for the matrices of the blocks, and of AdamW for the others."""
    model = build_model(TINY, split.vocabulary, 16, split.end_of_text, 3).whole().train()
    named = [*model.named_parameters()]
    matrices = [p for name, p in named if name.startswith("transformer.h.") and p.dim() == 2]
    others = [p for _, p in named if all(p is not matrix for matrix in matrices)]
    assert len(matrices) == 2 * 4
    optimizers = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.1),
    ]
    batches, losses = Batches(split, 16, 3), []
    for step, rate in enumerate(rates):
        tokens = batches.batch(step * samples, samples)
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(float(loss))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
    return losses


@on_ranks(2)
def test_muon_trains_the_matrices_of_blocks_as_plain_torch(group, data):
    split = open_split(data / "tokens", "train")
    sizes = {"steps": 5, "warmup_steps": 2, "global_batch_size": 8, "accumulation": 2}
    numbers = {"sequence_length": 16, "learning_rate": 0.01, "weight_decay": 0.1, "clip": 0.5}
    train = Train(optimizer="muon", untimed_steps=0, **sizes, **numbers)
    built = build_loop(TINY, parse_strategy({"engine": "ddp"}), train, split, 3, None, group)
    events = []
    built.loop.run(5, events.append)
    losses = torch.tensor([event.loss for event in events], dtype=torch.float64)
    dist.all_reduce(losses)
    expected = by_muon(split)
    # its products are in bfloat16, in which sums of two ranks may round otherwise
    assert (losses / 2).tolist() == pytest.approx(expected, rel=1e-3)
    assert abs(expected[-1] - written_out(split, (0.9, 0.95))[-1]) > 0.01


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "ddp"])
@on_ranks(2)
def test_muon_is_refused_where_ranks_keep_parts_of_matrices(group, data, engine):
    split, train = open_split(data / "tokens", "train"), Train(optimizer="muon", sequence_length=16)
    with pytest.raises(UserError) as error:
        build_loop(TINY, parse_strategy({"engine": engine}), train, split, 3, None, group)
    assert str(error.value) == (
        f"train.optimizer: muon needs whole matrices, of which ranks of {engine} keep parts: set "
        "engine: ddp, or optimizer: adamw"
    )


def losses_with(data, group, dropout, ranks, **train):
    """Losses of three steps of eight samples, of each rank."""
    split = open_split(data / "tokens", "train")
    sizes = {"steps": 3, "warmup_steps": 1, "untimed_steps": 0, "sequence_length": 16}
    train = Train(world_size=ranks, **sizes, **train)
    model = Model(preset="tiny", dropout=dropout)
    built = build_loop(model, parse_strategy({"engine": "ddp"}), train, split, 3, None, group)
    events = []
    built.loop.run(3, events.append)
    return torch.tensor([event.loss for event in events], dtype=torch.float64)


def test_dropout_does_not_depend_on_the_number_of_ranks(data):
    """What is dropped is that of a seed and of the samples of a micro-batch."""

    def on_rank(group, dropout, accumulation):
        ranks = dist.get_world_size(group)
        batch = {"global_batch_size": 8, "accumulation": accumulation}
        losses = losses_with(data, group, dropout, ranks, **batch)
        return {"losses": losses}

    found = {
        (dropout, ranks): torch.stack(
            [
                result["losses"]
                for result in run_ranks(
                    ranks, partial(on_rank, dropout=dropout, accumulation=4 // ranks)
                )
            ]
        ).mean(0)
        for dropout, ranks in ((0.2, 1), (0.2, 2), (0.2, 4), (0.0, 2))
    }
    for ranks in (2, 4):
        torch.testing.assert_close(found[0.2, ranks], found[0.2, 1], rtol=1e-5, atol=0)
    assert (found[0.0, 2] - found[0.2, 2]).abs().min() > 1e-3


@on_ranks(2)
def test_time_in_collectives_is_known_at_the_end_of_a_step(group, data, tmp_path):
    events = Run.start(plan_of(data, strategy_of("fsdp2")), tmp_path, group).to(2).events
    assert all(0 < event.collective_ms <= event.step_ms for event in events)


def test_steps_are_counted_that_were_clipped_and_that_were_left_out() -> None:
    clip, before, counts = 2.0, None, []
    for norm, letter in zip((1.0, 2.0, 2.1, math.inf, 0.1), "+++-+", strict=True):
        (event,) = events(letter, gradient_norm=norm)
        event.count(before, clip)
        counts.append((event.clipped_steps, event.skipped_steps))
        before = event
    assert counts == [(0, 0), (0, 0), (1, 0), (2, 1), (2, 1)]
    before.count(None, clip=None)
    assert (before.clipped_steps, before.skipped_steps) == (0, 0)


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
