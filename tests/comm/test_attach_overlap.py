"""Communication beside computation gives the gradients that communication by turns gives."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from wrapped_models import backward, ddp, fsdp2, network

import shardlab
from shardlab.core.errors import UserError


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.to_local().flatten() for p in model.parameters()])


@pytest.mark.parametrize("codec", ["none", "int8:group=64"])
def test_gradients_are_those_of_communication_by_turns(codec):
    def on_rank(group):
        found = []
        for overlap in (False, True):
            model = fsdp2(group)
            options = {"error_feedback": codec != "none", "minimum_size": 0, "route": "exchange"}
            handle = shardlab.attach(model, codec, codec, overlap=overlap, **options)
            for step in range(3):
                model.zero_grad()
                backward(model, group, step)
                handle.drain()
                found.append(gradients(model))
        return {"gradients": torch.stack(found)}

    for result in run_ranks(2, on_rank):
        by_turns, beside = result["gradients"].chunk(2)
        assert torch.equal(by_turns, beside)


def test_gradients_of_a_step_before_are_refused():
    def on_rank(group):
        model = fsdp2(group)
        handle = shardlab.attach(model, "int8", overlap=True)
        backward(model, group, 0)
        handle.drain()
        with pytest.raises(UserError, match="set them to None"):
            backward(model, group, 1)
        return {}

    run_ranks(2, on_rank)


def of_two_dimensions(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    return fully_shard(network(), mesh=mesh)


def of_another_type(group):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(network(), mp_policy=policy)


@pytest.mark.parametrize("make", [ddp, of_two_dimensions, of_another_type])
def test_where_the_sum_is_needed_at_once_overlap_is_refused(make):
    def on_rank(group):
        model = make(group)
        with pytest.raises(UserError, match="overlap"):
            shardlab.attach(model, "int8", overlap=True)
        dist.barrier(group)
        return {}

    run_ranks(2, on_rank)
