"""The end of what is attached, by `detach`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.wrapped_models import backward, network
from tests.ranks import on_ranks


def delayed(group, mesh):
    model = DistributedDataParallel(network())
    inner = torch.optim.SGD(model.parameters(), 0.01)
    return model, shardlab.attach(model, sync={"every": 2, "delay": 1}, optimizer=inner)


def on_two_levels(group, mesh):
    model = DistributedDataParallel(network())
    levels = {"codec": "int8", "between_nodes": "bf16", "ranks_per_node": 2}
    return model, shardlab.attach(model, {**levels, "minimum_size": 0})


def with_replicas(group, mesh):
    model = nn.Linear(40, 31)
    fully_shard(model, mesh=mesh)
    return model, shardlab.attach(model, "int8")


@pytest.mark.parametrize(
    ("make", "world_size"), [(delayed, 2), (on_two_levels, 4), (with_replicas, 2)]
)
@on_ranks()
def test_a_process_that_attaches_often_makes_no_more_groups(group, make, world_size, monkeypatch):
    """As a sweep does, which would run out of the connections that torch keeps for each group."""
    made = []

    def new_group(*args, original=dist.new_group, **kwargs):
        made[-1] += 1
        return original(*args, **kwargs)

    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicas", "shards"))
    monkeypatch.setattr(dist, "new_group", new_group)
    for _ in range(3):
        made.append(0)
        model, handle = make(group, mesh)
        backward(model, group, 0)
        handle.detach()
        handle.detach()  # again, it does nothing
        backward(model, group, 1)
    first, *later = made
    assert first > 0 and later == [0, 0]
