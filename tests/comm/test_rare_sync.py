"""Rare synchronisation: replicas that exchange parameters every few steps."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from tests.comm.replicas import MADE, PLAIN, attached, flat, refusal, trained
from tests.comm.wire import is_same_everywhere
from tests.comm.wrapped_models import ddp, fsdp2, full, hsdp, network
from tests.ranks import on_ranks


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_an_exchange_after_every_step_is_data_parallel(group, make):
    expected = trained(make(group), group, 4)
    model = make(group)
    _, optimizer = attached(model, 1, **PLAIN)
    for found, wanted in zip(trained(model, group, 4, optimizer), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_replicas_train_alone_and_are_equal_after_each_exchange(group, make):
    alone = DistributedDataParallel(
        network(), process_group=dist.new_group([dist.get_rank()], use_local_synchronization=True)
    )
    expected = trained(alone, group, 2)
    model = make(group)
    handle, optimizer = attached(model, 3)
    found = trained(model, group, 7, optimizer)
    sent = handle.ledger.summary()["gradients"]
    for step in (0, 1):
        torch.testing.assert_close(found[step], expected[step], rtol=1e-6, atol=1e-7)
    same = [is_same_everywhere(parameters, group) for parameters in found]
    assert same == [False, False, True, False, False, True, False]
    # two exchanges of the model, of which each rank sends a half twice
    assert sent["bytes_raw"] == 2 * 4 * found[0].numel()


@on_ranks(2)
def test_one_replica_trains_as_without_exchanges(group):
    expected = trained(fsdp2(group), group, 5)
    model = fsdp2(group)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    shardlab.attach(model, sync={"every": 2, **PLAIN}, optimizer=optimizer, replicas=alone)
    found = trained(model, group, 5, optimizer)
    torch.testing.assert_close(found[-1], expected[-1], rtol=1e-5, atol=1e-6)


@on_ranks(4)
def test_shards_are_reduced_in_replicas_and_exchanged_between_them(group):
    model = hsdp(group)
    handle, optimizer = attached(model, 2, momentum=0.5)
    found = trained(model, group, 4, optimizer)
    assert [is_same_everywhere(each, group) for each in found] == [False, True, False, True]
    for name, tensor in handle.exchanged_state_dict().items():
        assert torch.equal(tensor.full_tensor(), full(model, "data")[name])


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [("sgd", [0.5, 1.25]), ("nesterov", [0.75, 1.625])],
)
@on_ranks(2)
def test_the_outer_optimizer_is_that_of_torch(group, optimizer, expected):
    """Each replica moves by 1 and by 0: means of 0.5."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    start = full(model, "data")["weight"].clone()
    handle = shardlab.attach(
        model, sync={"every": 1, "optimizer": optimizer, "momentum": 0.5, "learning_rate": 1.0}
    )
    for wanted in expected:
        with torch.no_grad():
            model.module.weight += float(dist.get_rank(group) == 0)
        handle.step()
        torch.testing.assert_close(model.module.weight.detach() - start, torch.full((1, 1), wanted))


@pytest.mark.parametrize("codec", ["int8:group=64", "int4:group=64", "topk:density=0.1"])
@on_ranks(2)
def test_what_is_sent_and_what_is_kept_is_what_was_there(group, codec):
    """With error feedback the outer parameters differ from exact ones by the residuals alone."""
    outer = []
    for options in ({}, {"codec": codec, "error_feedback": True}):
        model = DistributedDataParallel(network())
        handle = shardlab.attach(model, sync={"every": 1, **PLAIN, **options, "alpha": 0.0})
        move = torch.Generator().manual_seed(dist.get_rank(group))
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.01 * torch.randn(parameter.shape, generator=move)
            handle.step()
        outer.append(flat(model))
        state = handle.state_dict()
    exact, lossy = outer
    assert is_same_everywhere(lossy, group)
    kept = [
        t.square().sum()
        for name, t in state.items()
        if ".sync.residual." in name and "layout:" not in name
    ]
    size = torch.stack(kept).sum()
    dist.all_reduce(size)
    assert 0 < (exact - lossy).norm() <= size.sqrt() * 2


@on_ranks(2)
def test_fragments_are_exchanged_at_different_steps(group):
    model = ddp(group)
    _, optimizer = attached(model, 4, fragments=2)
    same = []
    for _ in range(2):
        for step in range(4):
            trained(model, group, 1, optimizer, step)
            same.append([is_same_everywhere(p.detach(), group) for p in model.parameters()])
    first = [True, True, False, False, True, True]  # the units are the layers 0, 2 and 3
    assert [all(s == f for s, f in zip(each, first, strict=True)) for each in same].count(True) == 2
    assert same[3] == first and same[5] == [not each for each in first]


@on_ranks(2)
def test_a_delayed_exchange_is_that_of_its_beginning(group):
    """Parameters at the end of the delay are the outer ones of its beginning."""
    prompt, delayed = ddp(group), ddp(group)
    _, optimizer = attached(prompt, 3)
    exchanged = trained(prompt, group, 3, optimizer)[-1]
    _, optimizer = attached(delayed, 3, delay=2)
    found = trained(delayed, group, 5, optimizer)
    assert torch.equal(found[4], exchanged)
    assert not is_same_everywhere(found[3], group)


@on_ranks(2)
def test_alpha_keeps_a_share_of_the_replica(group):
    alone, mixed = ddp(group), ddp(group)
    attached(alone, 99)
    own = trained(alone, group, 2, torch.optim.SGD(alone.parameters(), 0.01))[-1]
    handle, optimizer = attached(mixed, 2, alpha=0.25)
    found = trained(mixed, group, 2, optimizer)[-1]
    outer = torch.cat([t.flatten() for t in handle.exchanged_state_dict().values()])
    assert is_same_everywhere(outer, group)
    torch.testing.assert_close(found, 0.25 * own + 0.75 * outer)
    handle.synchronize()
    assert is_same_everywhere(flat(mixed), group)


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
@on_ranks(2)
def test_the_warm_up_is_data_parallel(group, make):
    expected = trained(make(group), group, 3)
    model = make(group)
    _, optimizer = attached(model, 4, warmup_steps=3)
    found = trained(model, group, 7, optimizer)
    torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-6)
    assert [is_same_everywhere(each, group) for each in found[3:]] == [False] * 3 + [True]


@on_ranks(2)
def test_the_outer_optimizer_has_seen_nothing_of_the_warm_up(group):
    """Replicas that were trained alike before `attach` take the same exchanges, with momentum."""
    warm, attached_later = ddp(group), ddp(group)
    _, optimizer = attached(warm, 2, warmup_steps=3, momentum=0.5)
    found = trained(warm, group, 7, optimizer)[3:]
    trained(attached_later, group, 3)
    _, optimizer = attached(attached_later, 2, momentum=0.5)
    expected = trained(attached_later, group, 4, optimizer, first=3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "outer",
    [
        {"state": "host", "momentum": 0.5},
        {
            **{"codec": "int4:group=64", "error_feedback": True, "momentum": 0.5},
            **{"delay": 1, "fragments": 2},
        },
    ],
    ids=str,
)
@on_ranks(2)
def test_a_saved_state_continues_bit_for_bit(group, outer):
    model = ddp(group)
    handle, optimizer = attached(model, 2, **outer)
    trained(model, group, 4, optimizer)
    saved = handle.state_dict(), copy.deepcopy(model.state_dict())
    expected = trained(model, group, 3, optimizer, first=4)
    again = ddp(group)
    handle, optimizer = attached(again, 2, **outer)
    again.load_state_dict(saved[1])
    handle.load_state_dict(saved[0])
    found = trained(again, group, 3, optimizer, first=4)
    assert all(map(torch.equal, found, expected))


@on_ranks(2)
def test_an_exchanged_state_is_of_one_moment(group):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(40, 8), nn.BatchNorm1d(8)))
    handle, optimizer = attached(model, 2)
    trained(model, group, 2, optimizer)
    state = handle.exchanged_state_dict()
    then = copy.deepcopy(state)
    trained(model, group, 3, optimizer, first=2)
    assert all(torch.equal(tensor, then[name]) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("outer", "steps"),
    [({}, [1, 2, 0, 1]), ({"delay": 1}, [1, 2, 3, 0, 1]), ({"warmup_steps": 2}, [0, 0, 1, 2])],
    ids=str,
)
@on_ranks(2)
def test_the_printed_line_and_detach_say_how_long_replicas_have_trained_alone(group, outer, steps):
    model = ddp(group)
    handle, optimizer = attached(model, 3, **outer)
    for step, count in enumerate(steps):
        trained(model, group, 1, optimizer, step)
        said = f"have trained {count} step{'s' * (count > 1)} since they were last equal"
        assert (said in str(handle)) == (count > 0) == ("handle.synchronize()" in str(handle))
    for warns in (True, False):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            handle.detach()
        said = [line for warning in caught if "last equal" in (line := str(warning.message))]
        assert len(said) == (warns and dist.get_rank(group) == 0)
    handle, _ = attached(ddp(group), 3)
    handle.synchronize()
    assert "handle.synchronize()" not in str(handle)


@on_ranks(2)
def test_what_is_on_the_way_may_be_finished_early(group):
    model = ddp(group)
    handle, optimizer = attached(model, 3, delay=2, fragments=2)
    trained(model, group, 4, optimizer)
    handle.synchronize()
    agreed = flat(model)
    handle.synchronize()  # nothing has moved since
    assert torch.equal(flat(model), agreed) and is_same_everywhere(agreed, group)
    trained(model, group, 4, optimizer, first=4)
    handle.synchronize()
    assert is_same_everywhere(flat(model), group)


@on_ranks(2)
def test_the_end_of_training_is_the_mean_of_the_replicas(group):
    model = ddp(group)
    handle, optimizer = attached(model, 20, momentum=0.9)
    own = trained(model, group, 2, optimizer)[-1]
    handle.synchronize()
    mean = own.clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(flat(model), mean / 2)


@pytest.mark.fresh_ranks
@on_ranks(2)
def test_collectives_of_the_script_do_not_meet_delayed_exchanges(group):
    model = ddp(group)
    handle, optimizer = attached(model, 2, delay=1)
    mine = torch.ones(2400)  # as many as the weights of a layer
    for step in range(8):
        trained(model, group, 1, optimizer, step)
        total = mine.clone()
        dist.all_reduce(total)
        assert torch.equal(total, 2 * mine)
    handle.synchronize()
    assert is_same_everywhere(flat(model), group)


@on_ranks(2)
def test_all_roots_of_fully_shard_are_exchanged(group):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = network()
    for layer in (model[0], model[2], model[3]):
        fully_shard(layer, mesh=mesh)
    _, optimizer = attached(model, 2)
    found = trained(model, group, 2, optimizer)
    assert [is_same_everywhere(each, group) for each in found] == [False, True]


@on_ranks(2)
def test_in_the_warm_up_the_model_itself_is_what_all_agree_on(group):
    model = ddp(group)
    handle, optimizer = attached(model, 2, warmup_steps=9)
    trained(model, group, 3, optimizer)
    outer = torch.cat([t.flatten() for t in handle.exchanged_state_dict().values()])
    assert torch.equal(outer, flat(model))


@on_ranks(2)
def test_after_detach_nothing_is_exchanged(group):
    expected, model = ddp(group), ddp(group)
    handle, optimizer = attached(model, 2)
    handle.detach()
    found = trained(model, group, 4, optimizer)
    assert "counts already" in refusal(handle.step)
    torch.testing.assert_close(found[-1], trained(expected, group, 4)[-1], rtol=1e-5, atol=1e-6)
    assert handle.ledger.summary()["gradients"]["collectives"] > 0  # of gradients again
