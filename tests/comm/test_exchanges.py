"""Replicas exchange trained parameters and running statistics, and nothing else."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.replicas import attached, flat, meshed, refusal, trained
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, batch, ddp
from tests.ranks import on_ranks


@on_ranks(2)
def test_running_statistics_are_averaged_at_exchanges(group):
    stock, model = (
        DistributedDataParallel(nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8)))
        for _ in range(2)
    )
    model.load_state_dict(stock.state_dict())
    trained(stock, group, 3)
    _, optimizer = attached(model, 2, warmup_steps=3)
    trained(model, group, 3, optimizer)
    for buffer, expected in zip(model.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(buffer, expected)  # those of rank 0 and this rank's own batch
    same = []
    for step in (3, 4):
        trained(model, group, 1, optimizer, step)
        same.append(is_same_everywhere(model.module[1].running_mean, group))
    assert same == [False, True]


class Buffers(nn.Module):
    """Buffers of other kinds than running statistics, as long as the longest batch so far."""

    def __init__(self, group):
        super().__init__()
        self.rank = torch.distributed.get_rank(group)
        self.layer = nn.Linear(40, 31)
        self.wide = nn.BatchNorm1d(31, affine=False).double()
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("seen", torch.tensor(2.0**24 + 1, dtype=torch.float64))

    def forward(self, x):
        self.queue = torch.arange(len(self.queue) + 1.0 + self.rank)
        self.wide(x[:, :31].double())
        return self.layer(x)


@pytest.mark.parametrize("outer", [{}, {"delay": 1}], ids=str)
@on_ranks(2)
def test_other_buffers_stay_as_they_are(group, outer):
    model = DistributedDataParallel(Buffers(group), broadcast_buffers=True)
    net = model.module
    _, optimizer = attached(model, 2, **outer)
    trained(model, group, 3, optimizer)
    assert torch.equal(net.queue, torch.arange(4.0 + 3 * (1 + net.rank)))
    assert net.seen.item() == 2**24 + 1
    assert net.wide.running_mean.dtype == torch.float64


@on_ranks(2)
def test_running_statistics_in_float64_have_its_precision(group):
    means = []
    for exchanges in (False, True):
        model = DistributedDataParallel(Buffers(group))
        if exchanges:
            _, optimizer = attached(model, 2)
            trained(model, group, 2, optimizer)
        else:
            for step in range(2):
                model.module(batch(model.module.rank, step))
        means.append(model.module.wide.running_mean.clone())
    alone, averaged = means
    torch.distributed.all_reduce(alone)
    torch.testing.assert_close(averaged, alone / 2, rtol=1e-14, atol=1e-15)


@on_ranks(2)
def test_no_buffers_are_exchanged_where_none_are_broadcast(group):
    net = nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8))
    model = DistributedDataParallel(net, broadcast_buffers=False)
    _, optimizer = attached(model, 2)
    trained(model, group, 2, optimizer)
    assert is_same_everywhere(flat(model), group)
    assert not is_same_everywhere(net[1].running_mean, group)


@on_ranks(2)
def test_an_evaluation_before_an_exchange_changes_nothing(group):
    ends = []
    for evaluates in (False, True):
        model = meshed(group)  # the root stays gathered after a forward pass without backward
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        handle = shardlab.attach(model, sync={"every": 2})
        for step in range(5):
            optimizer.zero_grad()
            backward(model, group, step)
            optimizer.step()
            if evaluates and step % 2:
                with torch.no_grad():
                    model(torch.ones(1, 40))
            handle.step()
        ends.append(flat(model))
    assert torch.equal(*ends)


@on_ranks(2)
def test_parameters_that_are_trained_later_are_named(group):
    model = meshed(group)
    model[2].requires_grad_(False)
    _, optimizer = attached(model, 2)
    trained(model, group, 1, optimizer)
    model[2].requires_grad_(True)
    said = refusal(lambda: trained(model, group, 1, optimizer))
    assert "2.weight was added, unfrozen or replaced" in said


@pytest.mark.parametrize("make", [ddp, meshed])
@on_ranks(2)
def test_parameters_may_be_frozen_for_the_step_of_another_model(group, make):
    """Before the first step, and for good."""
    model = make(group)
    _, optimizer = attached(model, 2)
    net = getattr(model, "module", model)
    for step in range(2):
        net.requires_grad_(False)
        net(torch.ones(1, 40, requires_grad=True)).sum().backward()
        net.requires_grad_(True)
        trained(model, group, 1, optimizer, step)
    assert is_same_everywhere(flat(model), group)
    net[2].requires_grad_(False)
    optimizer.step()
    optimizer.step()
    assert is_same_everywhere(flat(model), group)
