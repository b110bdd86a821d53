"""Overlapped communication gives the gradients of blocking communication."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import shardlab
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import backward, ddp, fsdp2, network
from tests.ranks import on_ranks, run_ranks


def gradients(model) -> torch.Tensor:
    return torch.cat([p.grad.to_local().flatten() for p in model.parameters()])


def one_dimension(group):
    return fsdp2(group)


def two_dimensions(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    return fully_shard(network(), mesh=mesh)


def reduced_in_another_type(group):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return fully_shard(network(), mp_policy=policy)


def computed_in_another_type(group):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_shard(network(), mp_policy=policy)


@pytest.mark.parametrize("codec", ["none", "int8:group=64"])
@pytest.mark.parametrize(
    "make", [one_dimension, two_dimensions, reduced_in_another_type, computed_in_another_type]
)
def test_gradients_are_those_of_communication_by_turns(make, codec):
    def on_rank(group):
        found = []
        for overlap in (False, True):
            model = make(group)
            options = {"error_feedback": codec != "none", "minimum_size": 0, "route": "exchange"}
            handle = shardlab.attach(model, codec, codec, overlap=overlap, **options)
            for step in range(3):
                # the second pass adds to the gradients of the first one
                if step != 1:
                    model.zero_grad()
                backward(model, group, step)
                handle.drain()
                found.append(gradients(model))
        return {"gradients": torch.stack(found)}

    for result in run_ranks(2, on_rank):
        interleave, beside = result["gradients"].chunk(2)
        assert torch.equal(interleave, beside)


@on_ranks(2)
def test_detach_takes_the_overlap_out(group) -> None:
    model = fsdp2(group)
    before = settings_of(model)
    shardlab.attach(model, "int8", overlap=True).detach()
    assert settings_of(model) == before


def settings_of(model):
    groups = [m._get_fsdp_state()._fsdp_param_groups for m in model.modules() if is_fsdp2(m)]
    return [(g.unshard_async_op, g._reduce_scatter_process_group) for each in groups for g in each]


def is_fsdp2(module):
    return isinstance(module, FSDPModule)


@on_ranks(2)
def test_overlap_is_refused_where_there_is_none_to_be_had(group) -> None:
    with pytest.raises(UserError, match="overlap is for fully_shard"):
        shardlab.attach(ddp(group), "int8", overlap=True)
    dist.barrier(group)
