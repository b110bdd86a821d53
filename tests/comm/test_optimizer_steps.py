"""Steps of a replica that count, and replicas whose numbers of steps differ."""

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.codecs.wire import PayloadError
from tests.comm.replicas import attached, flat, refusal, stepped, trained
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, ddp, hsdp
from tests.ranks import on_ranks


@on_ranks(2)
def test_several_optimizers_count_one_step(group):
    model = ddp(group)
    first, *rest = model.parameters()
    both = torch.optim.SGD([first], 0.01), torch.optim.AdamW(rest, 0.01)
    shardlab.attach(model, sync_every=2, optimizer=both)
    same = []
    for step in range(4):
        backward(model, group, step)
        for optimizer in both:
            optimizer.step()
        same.append(is_same_everywhere(flat(model), group))
    assert same == [False, True, False, True]


@pytest.mark.parametrize(
    "outer", [{}, pytest.param({"delay": 1, "fragments": 2}, marks=pytest.mark.long)], ids=str
)
@pytest.mark.parametrize("steps", [6, 7])
@on_ranks(2)
def test_a_replica_that_stops_early_is_told_on_all_ranks(group, outer, steps):
    """Whether or not it has something to send at the end."""
    rank, model = dist.get_rank(group), ddp(group)
    handle, optimizer = attached(model, 3, **outer)

    def run():
        stepped(model, optimizer, steps - rank, group)
        handle.synchronize()

    said = refusal(run, PayloadError)
    assert f"rank 0: step {steps}; rank 1: step {steps - 1}" in said and "drop_last=True" in said


@on_ranks(4)
def test_ranks_that_differ_have_their_numbers_in_the_world(group):
    model = hsdp(group)
    handle = shardlab.attach(model, sync_every=9)
    model(torch.ones(1, 40))
    rank = dist.get_rank(group)
    for _ in range(1 + rank // 2):
        handle.step()
    said = refusal(handle.synchronize, PayloadError)
    assert f"rank {rank % 2}: step 1" in said and f"rank {rank % 2 + 2}: step 2" in said


@on_ranks(2)
def test_steps_that_a_scaler_leaves_out_are_counted_by_hand(group):
    """A gradient of one replica overflows, and its optimizer does not step."""
    rank = dist.get_rank(group)

    def run(model, handle, inner, count):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            overflows = step == 1 and rank == 0
            loss = model(torch.ones(2, 40)).sum() * (torch.inf if overflows else 1.0)
            scaler.scale(loss).backward()
            scaler.step(inner)
            scaler.update()
            inner.zero_grad()
            count()
        handle.synchronize()

    model = ddp(group)
    handle, inner = attached(model, 2)
    said = refusal(lambda: run(model, handle, inner, lambda: None), PayloadError)
    assert "handle.step() in place of optimizer=" in said
    model = ddp(group)
    handle = shardlab.attach(model, sync_every=2)
    run(model, handle, torch.optim.SGD(model.parameters(), 0.01), handle.step)
    assert is_same_everywhere(flat(model), group)


@on_ranks(2)
def test_updates_of_single_layers_are_not_counted_as_steps(group):
    model = ddp(group)
    layers = [{"name": name, "params": [p]} for name, p in model.named_parameters()]
    optimizer = shardlab.LayerAdam(layers, threads=1)
    shardlab.attach(model, sync_every=1, optimizer=optimizer)
    backward(model, group, 0)
    assert "handle.step()" in refusal(lambda: optimizer.step(layer=layers[0]["name"]))


@on_ranks(2)
def test_steps_that_nothing_counts_are_told(group):
    model = ddp(group)
    shardlab.attach(model, sync_every=1)
    assert "handle.step()" in refusal(lambda: trained(model, group, 12))


@on_ranks(2)
def test_steps_of_an_optimizer_that_took_the_place_of_another_are_told(group):
    model = ddp(group)
    _, optimizer = attached(model, 1)
    stepped(model, optimizer, 2, group)
    assert "give attach all that step" in refusal(lambda: trained(model, group, 12))


@on_ranks(2)
def test_replicas_begin_before_the_first_step_of_any_optimizer(group):
    """Of two, one of which steps every second time."""
    model = ddp(group)
    first, *rest = model.parameters()
    often, rarely = torch.optim.SGD(rest, 0.01), torch.optim.SGD([first], 0.01)
    shardlab.attach(model, sync_every=1, optimizer=[often, rarely])
    for step in range(4):
        backward(model, group, step)
        often.step()
        if step % 2:
            rarely.step()
    assert is_same_everywhere(flat(model), group)


class Wrapped(torch.optim.Optimizer):
    """As Accelerate does it."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups


@on_ranks(2)
def test_optimizers_are_counted_once_and_without_their_wrappers(group):
    model = ddp(group)
    inner = torch.optim.SGD(model.parameters(), 0.01)
    shardlab.attach(model, sync_every=2, optimizer=[Wrapped(inner), inner])
    found = trained(model, group, 2, inner)
    assert [is_same_everywhere(each, group) for each in found] == [False, True]


@on_ranks(2)
def test_the_end_of_steps_that_nothing_counted_is_refused(group):
    model = ddp(group)
    handle = shardlab.attach(model, sync_every=32)
    handle.synchronize()  # nothing has moved
    trained(model, group, 3)
    with pytest.raises(PayloadError, match=r"step 0.*handle\.step\(\)"):
        handle.synchronize()
