"""Outer parameters belong to their model; momentum goes on with another number of replicas."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.replicas import attached, flat, refusal, trained
from tests.comm.wrapped_models import ddp, hsdp, network
from tests.ranks import on_ranks, run_ranks


def stage(net, name):
    """Train one of two layers of equal size."""
    for layer in (net[0], net[1]):
        layer.requires_grad_(layer is net[name])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net[name].parameters(), 0.01)
    outer = {"momentum": 0.9}
    return shardlab.attach(model, sync={"every": 2, **outer}, optimizer=optimizer), model, optimizer


@on_ranks(2)
def test_a_state_of_other_parameters_of_the_same_size_is_refused(group):
    net = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    handle, model, optimizer = stage(net, 0)
    trained(model, group, 2, optimizer)
    state = handle.state_dict()
    handle.detach()
    handle, *_ = stage(net, 1)
    said = refusal(lambda: handle.load_state_dict(state))
    assert "other parameters" in said and "without handle.load_state_dict" in said


@pytest.mark.parametrize("new", [1, 3])
def test_outer_momentum_goes_on_with_another_number_of_replicas(new):
    """It is the same on all: without a step the outer parameters move by it alone."""

    def on_two_ranks(group):
        model = ddp(group)
        handle, optimizer = attached(model, 2, optimizer="sgd", momentum=0.9, learning_rate=0.5)
        trained(model, group, 2, optimizer)
        before = flat(ddp(group))
        return {"moved": flat(model) - before, **handle.state_dict()}

    states = run_ranks(2, on_two_ranks)
    moved = [state.pop("moved") for state in states]

    def on_new_ranks(group):
        model = ddp(group)
        handle, optimizer = attached(model, 2, optimizer="sgd", momentum=0.9, learning_rate=0.5)
        handle.load_state_dict(shardlab.merge_states(states, new, dist.get_rank(group)))
        before = flat(model)
        for _ in range(2):
            optimizer.step()  # without gradients
        torch.testing.assert_close(flat(model) - before, 0.9 * moved[0])

    run_ranks(new, on_new_ranks)


@on_ranks(4)
def test_momentum_of_other_shards_begins_anew_and_is_told(group):
    model = hsdp(group)
    handle, optimizer = attached(model, 2, momentum=0.5)
    trained(model, group, 2, optimizer)
    states = [None] * 4
    dist.all_gather_object(states, handle.state_dict(), group)
    rank = dist.get_rank(group)

    def warned(model):
        handle, _ = attached(model, 2, momentum=0.5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle.load_state_dict(shardlab.merge_states(states, 4, rank))
        return [str(w.message) for w in caught if "outer momentum begins at 0" in str(w.message)]

    assert warned(hsdp(group)) == []
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("r", "s"))
    assert len(warned(fully_shard(network(), mesh=mesh))) == (rank == 0)


@on_ranks(2)
def test_parameters_without_values_are_refused(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    with torch.device("meta"):
        model = nn.Linear(8, 8)
    fully_shard(model, mesh=mesh)
    assert "attach after to_empty()" in refusal(lambda: shardlab.attach(model, sync={"every": 2}))
