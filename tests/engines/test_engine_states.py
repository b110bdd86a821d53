"""Engines resume exactly, and a gradient that is not finite leaves no trace in their state."""

import pytest
import torch
import torch.distributed as dist

from tests.engines.engine_cases import LOSSY, STRATEGIES, batch_of, make, train
from tests.ranks import on_ranks
from tests.whole_parameters import whole_parameters


@pytest.mark.parametrize(
    "name",
    [
        *("ddp", "ddp-int8", "ddp-topk", "ddp-powersgd", "fsdp2", "fsdp2-topk", "fsdp2-powersgd"),
        *("fsdp2-everything", "fsdp2-ahead-topk", "manual-topk", "slide-full-cpu", "slide-topk"),
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
        *("ddp", "fsdp2", "ddp-int8", "fsdp2-powersgd", "fsdp2-everything", "manual-topk"),
        *("slide-full-cpu", "slide-topk", "slide-int8"),
    ],
)
@on_ranks(2)
def test_nonfinite_gradient_skips_the_step_on_all_ranks(group, name) -> None:
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
