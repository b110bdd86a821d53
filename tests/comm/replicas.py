"""Replicas that exchange parameters every few steps, for the tests."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardlab
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import backward, ddp, full, network


def meshed(group):
    """As many replicas as ranks, each on one rank."""
    size = dist.get_world_size(group)
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicas", "shards"))
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MADE = {"ddp": ddp, "fsdp2": meshed}
PLAIN = {"optimizer": "sgd", "momentum": 0.0}


def flat(model):
    return torch.cat([p.flatten() for p in full(model, "data").values()])


def trained(model, group, steps, optimizer=None, first=0, rank=None):
    """Train by SGD; return the parameters after each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01)
    found = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, group, step)
        optimizer.step()
        found.append(flat(model))
    return found


def attached(model, every, **options):
    """Return the handle, and the inner optimizer whose steps it counts."""
    inner = torch.optim.SGD(model.parameters(), 0.01)
    return shardlab.attach(model, sync={"every": every, **options}, optimizer=inner), inner


def refusal(call, error=UserError):
    with pytest.raises(error) as caught:
        call()
    (line,) = str(caught.value).splitlines()
    return line


def stepped(model, optimizer, steps, group):
    """Train as scripts do, without a look at the parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, group, step)
        optimizer.step()
