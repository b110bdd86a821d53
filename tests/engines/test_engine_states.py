"""Engines resume exactly, and a gradient that is not finite leaves no trace in their state."""

import pytest
import torch
import torch.distributed as dist

from tests.engines.engine_cases import LOSSY, STRATEGIES, batch_of, make, train
from tests.ranks import run_ranks
from tests.whole_parameters import whole_parameters


@pytest.mark.parametrize(
    "name",
    [
        "ddp",
        "ddp-int8",
        "ddp-topk",
        "ddp-powersgd",
        "fsdp2",
        "fsdp2-topk",
        "fsdp2-powersgd",
        "fsdp2-everything",
        "fsdp2-ahead-topk",
        "manual-topk",
        "slide-full-cpu",
        "slide-topk",
    ],
)
def test_resume_continues_bit_for_bit(name):
    strategy = {**STRATEGIES, **LOSSY}[name]

    def on_rank(group):
        engine = make(group, strategy)
        train(engine, group, 3)
        saved = clone({**engine.shards(), **engine.rank_state()})
        straight = train(engine, group, 3, first=3)
        resumed = make(group, strategy)
        for kind, tensors in resumed.shards().items():
            for key, tensor in tensors.items():
                tensor.copy_(saved[kind][key])
        resumed.load_rank_state(saved)
        return {"straight": straight, "resumed": train(resumed, group, 3, first=3)}

    for result in run_ranks(2, on_rank):
        assert torch.equal(result["straight"], result["resumed"])


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
def test_a_gradient_that_is_not_finite_is_left_out_on_all_ranks(name):
    def on_rank(group):
        rank = dist.get_rank(group)
        engine = make(group, {**STRATEGIES, **LOSSY}[name])
        train(engine, group, 3)
        before, residuals = whole_parameters(engine), residuals_of(engine)
        hook = engine.module.register_forward_hook(lambda *call: poison(call[-1], rank))
        outcome = engine.step([batch_of(3, 0, rank)], 1e-3)
        hook.remove()
        after, kept = whole_parameters(engine), residuals_of(engine)
        same = [torch.equal(before[key], after[key]) for key in before]
        same += [torch.equal(residuals[key], kept[key]) for key in residuals]
        again = engine.step([batch_of(4, 0, rank)], 1e-3)
        return {
            "applied": torch.tensor([outcome.applied, again.applied]),
            "same": torch.tensor(same),
        }

    for result in run_ranks(2, on_rank):
        assert result["applied"].tolist() == [False, True] and result["same"].all()


def poison(output, rank):
    """One number of rank 0 is not finite before gradients are communicated."""
    if rank == 0:
        output.logits = output.logits.clone()
        output.logits[0, 0, 0] = float("nan")
    return output


def residuals_of(engine):
    state = engine.rank_state()["communication"]
    return clone({key: value for key, value in state.items() if ".residual." in key})
