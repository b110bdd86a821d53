"""Weights and states that are loaded, and what exchanges make of them."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.replicas import MADE, attached, flat, refusal, stepped, trained
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import backward, ddp, network
from tests.ranks import on_ranks


@on_ranks(2)
def test_weights_may_be_loaded_until_the_first_step(group):
    stock, model = ddp(group), ddp(group)
    handle, optimizer = attached(model, 1, momentum=0.5)
    model(torch.ones(1, 40))
    for loading in (stock, model):
        loading.load_state_dict({k: v / 2 for k, v in loading.state_dict().items()})
    loaded = flat(model)
    agreed = torch.cat([t.flatten() for t in handle.exchanged_state_dict().values()])
    assert torch.equal(agreed, loaded)
    (found,) = trained(model, group, 1, optimizer)
    # Nesterov's first step is 1 + momentum times what data parallel training moves
    (moved,) = trained(stock, group, 1)
    torch.testing.assert_close(found, loaded + 1.5 * (moved - loaded), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_weights_and_state_of_one_step_take_a_run_back_to_it(group, make):
    model = make(group)
    handle, optimizer = attached(model, 2, momentum=0.5)
    trained(model, group, 3, optimizer)
    weights, state = copy.deepcopy(model.state_dict()), handle.state_dict()
    expected = trained(model, group, 3, optimizer, first=3)
    model.load_state_dict(weights)
    handle.load_state_dict(state)
    assert all(map(torch.equal, trained(model, group, 3, optimizer, first=3), expected))


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_an_average_may_take_the_place_of_the_weights_between_two_steps(group, make):
    ends = []
    for evaluates in (False, True):
        model = make(group)
        _, optimizer = attached(model, 2)
        trained(model, group, 3, optimizer)
        if evaluates:
            weights = copy.deepcopy(model.state_dict())
            model.load_state_dict({k: torch.zeros_like(v) for k, v in weights.items()})
            model.load_state_dict(weights)
        ends.append(trained(model, group, 2, optimizer, first=3)[-1])
    assert torch.equal(*ends)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_parameters_that_take_the_place_of_others_are_told(group, make):
    model = make(group)
    _, optimizer = attached(model, 2)
    trained(model, group, 1, optimizer)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert "assign=True" in refusal(optimizer.step)


@on_ranks(2)
def test_an_evaluation_before_the_first_step_replaces_nothing(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(network(), mesh=mesh)  # the root has parameters, and keeps them gathered
    _, optimizer = attached(model, 2)
    with torch.no_grad():
        model(torch.ones(1, 40))
        model(torch.ones(1, 40))
    trained(model, group, 1, optimizer)
    with torch.no_grad():
        model(torch.ones(1, 40))
    model[0].load_state_dict(model[0].state_dict())
    assert is_same_everywhere(trained(model, group, 1, optimizer, first=1)[-1], group)


@on_ranks(2)
def test_weights_may_be_loaded_in_the_warm_up(group):
    model = ddp(group)
    _, optimizer = attached(model, 2, warmup_steps=3)
    trained(model, group, 1, optimizer)
    model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})
    found = trained(model, group, 4, optimizer, first=1)
    assert [is_same_everywhere(each, group) for each in found] == [True, True, False, True]


@on_ranks(2)
def test_weights_may_be_loaded_after_a_merged_state(group):
    model = ddp(group)
    handle, optimizer = attached(model, 2, momentum=0.5)
    trained(model, group, 2, optimizer)
    weights = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    states = [None, None]
    dist.all_gather_object(states, handle.state_dict(), group)
    merged = shardlab.merge_states(states, 2, dist.get_rank(group))
    ends = []
    for state_first in (True, False):
        model = ddp(group)
        handle, optimizer = attached(model, 2, momentum=0.5)
        if state_first:
            handle.load_state_dict(merged)
        model.load_state_dict(weights)
        if not state_first:
            handle.load_state_dict(merged)
        ends.append(trained(model, group, 2, optimizer, first=2)[-1])
    assert torch.equal(*ends)


@on_ranks(2)
def test_a_copy_of_the_model_is_not_exchanged(group):
    model = ddp(group)
    handle, optimizer = attached(model, 2)
    average = torch.optim.swa_utils.AveragedModel(model.module)
    trained(model, group, 1, optimizer)
    average.update_parameters(model.module)
    other = copy.deepcopy(model.module)
    other.load_state_dict({k: 2 * v for k, v in other.state_dict().items()})
    assert is_same_everywhere(trained(model, group, 1, optimizer, first=1)[-1], group)
    loaded = pickle.loads(pickle.dumps(model.module))
    loaded.load_state_dict(other.state_dict())
    handle.synchronize()
    assert is_same_everywhere(flat(model), group)


@pytest.mark.parametrize("state_first", [True, False])
@on_ranks(2)
def test_a_resumed_run_begins_with_the_weights_that_were_saved(group, state_first):
    """Weights of rank 0 on all ranks, as DistributedDataParallel sends them, are told on all."""
    model = ddp(group)
    handle, optimizer = attached(model, 6, momentum=0.5)
    trained(model, group, 3, optimizer)
    saved, state = copy.deepcopy(model.state_dict()), handle.state_dict()
    expected = trained(model, group, 4, optimizer, first=3)

    def resumed(weights):
        model = ddp(group)
        handle, optimizer = attached(model, 6, momentum=0.5)
        if state_first:
            handle.load_state_dict(state)
        model.load_state_dict(weights)
        if not state_first:
            handle.load_state_dict(state)
        return handle, optimizer, model

    handle, optimizer, model = resumed(saved)
    again = handle.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
    assert all(map(torch.equal, trained(model, group, 4, optimizer, first=3), expected))
    of_first = copy.deepcopy(saved)
    for tensor in of_first.values():
        dist.broadcast(tensor, 0)
    for call in (lambda h, o: o.step(), lambda h, o: h.synchronize()):
        handle, optimizer, _ = resumed(of_first)
        said = refusal(lambda h=handle, o=optimizer, call=call: call(h, o))
        assert "not those of step 3" in said and "merge_states" in said


@pytest.mark.parametrize("skipping", [{1}, {0, 1}], ids=str)
@on_ranks(2)
def test_replicas_that_leave_out_their_first_update_after_a_state_go_on_together(group, skipping):
    """As GradScaler leaves out the update of a replica whose gradients are not finite."""
    rank = dist.get_rank(group)

    def begun():
        model = ddp(group)
        handle = shardlab.attach(model, sync={"every": 4})
        return handle, model, torch.optim.SGD(model.parameters(), 0.01)

    def train(handle, model, optimizer, steps):
        for step in steps:
            backward(model, group, step)
            if step != 2 or rank not in skipping:
                optimizer.step()
            optimizer.zero_grad()
            handle.step()

    handle, model, optimizer = begun()
    train(handle, model, optimizer, range(2))
    weights, state = copy.deepcopy(model.state_dict()), handle.state_dict()
    train(handle, model, optimizer, range(2, 4))
    expected = flat(model)
    handle, model, optimizer = begun()
    model.load_state_dict(weights)
    handle.load_state_dict(state)
    train(handle, model, optimizer, range(2, 4))
    assert torch.equal(flat(model), expected) and is_same_everywhere(expected, group)


@on_ranks(2)
def test_wrong_weights_of_a_replica_that_leaves_out_its_first_update_are_told_on_all(group):
    model = ddp(group)
    handle = shardlab.attach(model, sync={"every": 4})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    backward(model, group, 0)
    optimizer.step()
    handle.step()
    handle.load_state_dict(handle.state_dict())
    if dist.get_rank(group) == 0:
        said = refusal(optimizer.step)
    else:
        model.load_state_dict({k: 2 * v for k, v in model.state_dict().items()})
        said = refusal(handle.step)
    assert "not those of step 1" in said


@on_ranks(2)
def test_a_state_of_more_replicas_is_told_how_to_go_on(group):
    model = ddp(group)
    handle, optimizer = attached(model, 4)
    stepped(model, optimizer, 2, group)
    # each rank goes on alone
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank(group)]
    other, _ = attached(DistributedDataParallel(network(), process_group=alone), 4)
    said = refusal(lambda: other.load_state_dict(handle.state_dict()))
    assert "of 2 replicas, here are 1" in said and "merge_states" in said


ONE = {"fragments": 1}
LATE = {"delay": 2, "fragments": 2}


@pytest.mark.parametrize(
    ("steps", "before", "after", "fix"),
    [
        (4, ONE, {"fragments": 2}, "sync={'fragments': 1, ...}"),
        (4, {"fragments": 2}, ONE, "sync={'fragments': 2, ...}"),
        (5, LATE, {"delay": 2}, "sync={'fragments': 2, ...}"),
        (5, LATE, {"fragments": 2}, "sync={'delay': 2, ...}"),
        (5, LATE, {**LATE, "every": 8}, "sync={'every': 4, ...}"),
        (2, {"warmup_steps": 3}, {}, "sync={'warmup_steps': 3, ...}"),
        (4, {"warmup_steps": 3}, {"warmup_steps": 5}, "sync={'warmup_steps': 3, ...}"),
        # nothing is on the way, and the warm-up is over
        (4, ONE, {"delay": 2, "every": 8}, None),
        (4, {"warmup_steps": 3}, {"warmup_steps": 4}, None),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_state_goes_on_with_settings_that_suit_it_and_names_others(
    group, steps, before, after, fix
):
    after = dict(after)
    every = after.pop("every", 4)
    model = ddp(group)
    handle, optimizer = attached(model, 4, **before)
    stepped(model, optimizer, steps, group)
    weights, state = copy.deepcopy(model.state_dict()), handle.state_dict()
    handle.wait()
    model = ddp(group)
    handle, optimizer = attached(model, every, **after)
    model.load_state_dict(weights)
    if fix is not None:
        assert fix in refusal(lambda: handle.load_state_dict(state))
        return
    handle.load_state_dict(state)
    stepped(model, optimizer, 9, group)
    handle.synchronize()
    assert is_same_everywhere(flat(model), group)


@pytest.mark.parametrize(
    ("before", "after"), [("int8", "powersgd:rank=1"), ("powersgd:rank=1", "int8")]
)
@on_ranks(2)
def test_residuals_that_another_codec_would_never_send_are_refused(group, before, after):
    settings = {"error_feedback": True, "minimum_size": 0}
    model = ddp(group)
    handle = shardlab.attach(model, {"codec": before, **settings})
    backward(model, group, 0)
    state = {name: tensor for name, tensor in handle.state_dict().items() if "method/" not in name}
    model = ddp(group)
    handle = shardlab.attach(model, {"codec": after, **settings})
    handle.load_state_dict(state)
    said = refusal(lambda: backward(model, group, 1))
    assert "attach with the codec that the state was saved with" in said
