"""Engines agree with each other, resume exactly, and leave out what is not finite."""

import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.core.errors import UserError
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.strategy.engine_traits import ENGINES
from tests.engines.engine_cases import (
    HYBRID,
    LENGTH,
    LOSSY,
    STRATEGIES,
    VOCABULARY,
    batch_of,
    losses_of,
    make,
    train,
)
from tests.ranks import on_ranks, run_ranks
from tests.whole_parameters import whole_parameters

ON_TWO = [name for name in STRATEGIES if name not in HYBRID]


@pytest.mark.parametrize("name", ON_TWO)
def test_engines_agree_on_two_ranks(name):
    # a sum of two numbers does not depend on their order; only fused kernels may round otherwise
    torch.testing.assert_close(losses_of(name, 2), losses_of("ddp", 2), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks_equal_two_micro_batches_of_one(name):
    def on_rank(group):
        engine = make(group, STRATEGIES[name])
        losses = [
            engine.step([batch_of(step, 0, rank) for rank in range(2)], 1e-3).loss
            for step in range(3)
        ]
        return {"losses": torch.tensor(losses)}

    alone = run_ranks(1, on_rank)[0]["losses"]
    torch.testing.assert_close(alone, losses_of(name, 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "micro"),
    [
        *((name, 2) for name in HYBRID),
        *(
            pytest.param(f"{engine}-hybrid", 1, marks=pytest.mark.long)
            for engine in ("fsdp1", "fsdp2", "manual")
        ),
    ],
)
def test_copies_of_a_model_agree_on_four_ranks(name, micro):
    expected = losses_of("ddp", 4, micro)
    torch.testing.assert_close(losses_of(name, 4, micro), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "name",
    [
        *(name for name in ENGINES if name != "ddp"),
        *("fsdp1-replicated", "fsdp1-original", "fsdp2-ahead", "fsdp2-overrides"),
        *("manual-overrides", "slide-shard-gpu"),
    ],
)
def test_accumulation_agrees_between_engines(name):
    expected = losses_of("ddp", 2, micro=2)
    torch.testing.assert_close(losses_of(name, 2, micro=2), expected, rtol=1e-5, atol=0)


# engines meet the graphs of a block, not the kernels that are made of them, which take long
@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "backend"),
    [
        ("fsdp2", "inductor"),
        *((engine, "aot_eager") for engine in ("ddp", "fsdp1", "manual")),
    ],
)
def test_compiled_blocks_compute_the_same(engine, backend):
    strategy = {"engine": engine, "compile": True, "activation_checkpointing": "selective"}
    compiled = functools.partial(torch.compile, backend=backend)

    def on_rank(group):
        with patch.object(torch, "compile", compiled):
            made = make(group, strategy)
        return {"losses": train(made, group, 3)}

    ranks = run_ranks(2, on_rank, timeout_s=300)
    losses = torch.stack([result["losses"] for result in ranks]).mean(0)
    # fused kernels round otherwise
    torch.testing.assert_close(losses, losses_of("ddp", 2), rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ENGINES)
@on_ranks(1)
def test_evaluation_mode_reaches_the_model_which_is_attached_once(group, engine) -> None:
    model = build_model(Model(preset="tiny"), VOCABULARY, LENGTH, 0, seed=1).whole()
    strategy = parse_strategy({"engine": engine})
    made = build_engine(model, strategy, Optimization(), group)
    for mode in (False, True):
        made.module.train(mode)
        assert model.lm_head.training is mode
    with pytest.raises(UserError, match=r"(anew|call detach\(\).*)$"):
        shardlab.attach(made.module, "int8")


@pytest.mark.parametrize(
    "name",
    [
        *(each for engine in ENGINES for each in (engine, f"{engine}-int8")),
        *("ddp-topk", "ddp-powersgd", "fsdp2-topk", "fsdp2-powersgd", "fsdp2-everything"),
        *("fsdp2-ahead-topk", "manual-topk", "slide-topk"),
    ],
)
@on_ranks(2)
def test_resumed_engine_matches_uninterrupted_run(group, name) -> None:
    strategy = {**STRATEGIES, **LOSSY}[name]
    engine = make(group, strategy)
    train(engine, group, 2)
    saved = clone({**engine.shards(), **engine.rank_state()})
    straight = train(engine, group, 2, first=2)
    resumed = make(group, strategy)
    for kind, tensors in resumed.shards().items():
        for key, tensor in tensors.items():
            tensor.copy_(saved[kind][key])
    resumed.load_rank_state(saved)
    assert torch.equal(train(resumed, group, 2, first=2), straight)


def clone(tree):
    if isinstance(tree, dict):
        return {key: clone(value) for key, value in tree.items()}
    return tree.clone() if isinstance(tree, torch.Tensor) else tree


@pytest.mark.parametrize(
    "name",
    [
        *(each for engine in ENGINES for each in (engine, f"{engine}-int8")),
        *("fsdp2-powersgd", "fsdp2-everything", "manual-topk", "slide-topk"),
    ],
)
@on_ranks(2)
def test_nonfinite_gradient_is_left_out_and_every_applied_step_has_ended(group, name) -> None:
    """Residuals of steps that had not ended would be rolled back, too."""
    rank = dist.get_rank(group)
    engine = make(group, {**STRATEGIES, **LOSSY}[name])
    train(engine, group, 2)
    before = whole_parameters(engine) | residuals_of(engine)
    hook = engine.module.register_forward_hook(lambda *call: poison(call[-1], rank))
    assert not engine.step([batch_of(2, 0, rank)], 1e-3).applied
    hook.remove()
    after = whole_parameters(engine) | residuals_of(engine)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert engine.step([batch_of(3, 0, rank)], 1e-3).applied


def poison(output, rank):
    """One number of rank 0 is not finite before gradients are communicated."""
    if rank == 0:
        output.logits = output.logits.clone()
        output.logits[0, 0, 0] = float("nan")
    return output


def residuals_of(engine):
    state = engine.rank_state()["communication"]
    return clone({key: value for key, value in state.items() if ".residual." in key})
