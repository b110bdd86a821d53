"""LayerAdam with fully_shard on two ranks: all tensors are DTensors."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import shardlab
from shardlab.core.errors import UserError
from tests.engines.layer_adam_cases import as_torch
from tests.ranks import on_ranks, run_ranks


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).to(dtype)


def train(model, optimizer, steps):
    for step in range(steps):
        batch = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(batch.to(model[0].weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def alike(ones, others):
    assert all(torch.equal(ones[name], others[name]) for name in others)


@as_torch
@on_ranks(2)
def test_sharded_parameters_are_updated_as_by_torchs_fused_optimizer_and_states_interchange() -> (
    None
):
    model, expected = fully_shard(network()), fully_shard(network())
    theirs = torch.optim.AdamW(expected.parameters(), 0.01, fused=True)
    train(expected, theirs, 3)
    train(model, shardlab.LayerAdam(model.parameters(), 0.01), 3)
    alike(whole(model), whole(expected))
    resumed = shardlab.LayerAdam(model.parameters(), 1.0)
    saved = checkpoint.get_optimizer_state_dict(expected, theirs)
    checkpoint.set_optimizer_state_dict(model, resumed, saved)
    train(model, resumed, 3)
    train(expected, theirs, 3)
    alike(whole(model), whole(expected))
    again = checkpoint.get_optimizer_state_dict(model, resumed)
    checkpoint.set_optimizer_state_dict(expected, theirs, again)


def test_stochastic_rounding_of_shards_matches_the_whole_tensor():
    def gradients(given):
        for i, each in enumerate(given):
            generator = torch.Generator().manual_seed(i)
            yield torch.randn(each.shape, generator=generator).to(each.dtype)

    expected = network(torch.bfloat16)
    for each, gradient in zip(
        expected.parameters(), gradients(list(expected.parameters())), strict=True
    ):
        each.grad = gradient
    shardlab.LayerAdam(expected.parameters(), exp_avg_sq_dtype=torch.bfloat16).step()

    def on_rank(group):
        model = network(torch.bfloat16)
        optimizer = shardlab.LayerAdam(model.parameters(), exp_avg_sq_dtype=torch.bfloat16)
        fully_shard(model)
        # what Accelerate does when it prepares a model and its optimizer
        optimizer.param_groups[0]["params"] = shards = list(model.parameters())
        for each, gradient in zip(shards, gradients(shards), strict=True):
            each.grad = torch.zeros_like(each)
            each.grad.to_local().copy_(gradient.chunk(2)[group.rank()])
        optimizer.step()
        return whole(model)

    for found in run_ranks(2, on_rank):
        alike(found, expected.state_dict())


@on_ranks(2)
def test_column_shards_train_in_float32_and_refuse_stochastic_rounding() -> None:
    def by_columns(model):
        return fully_shard(model, shard_placement_fn=lambda each: Shard(each.dim() - 1))

    model, expected = by_columns(network()), by_columns(network())
    train(expected, torch.optim.AdamW(expected.parameters(), 0.01, fused=True), 1)
    train(model, shardlab.LayerAdam(model.parameters(), 0.01), 1)
    for name, value in whole(expected).items():
        torch.testing.assert_close(whole(model)[name], value, rtol=1e-6, atol=1e-8)
    narrow = by_columns(network(torch.bfloat16))
    with pytest.raises(UserError, match=r"\(64, 32\) is cut across its rows"):
        train(narrow, shardlab.LayerAdam(narrow.parameters(), 0.01), 1)
