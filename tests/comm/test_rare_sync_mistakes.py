"""Rare synchronisation answers a mistake in one line, and names a rank that is lost."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.codecs.wire import PayloadError
from shardlab.train.launch import RunFailed, launch
from tests.comm.replicas import attached, refusal, stepped, trained
from tests.comm.wrapped_models import Crossed, ddp, fsdp2, network
from tests.ranks import on_ranks


@on_ranks(2)
def test_what_cannot_be_exchanged_is_refused_in_one_line(group):
    model = ddp(group)
    some = torch.optim.SGD([next(model.parameters())], 0.01)
    attach = shardlab.attach
    assert "no optimizer holds" in refusal(lambda: attach(model, sync={"every": 2}, optimizer=some))
    for options, said in (
        ({"fragments": 9}, "9 fragments of a model of 3 units"),
        ({"delay": 2}, "delay 2 must be below every 2"),
        ({"codec": "efsign", "decay": 0.5}, "decay does nothing without error_feedback"),
        ({"learning_rat": 1}, "learning_rate"),
    ):
        settings = {"every": 2, **options}
        assert said in refusal(lambda settings=settings: attach(model, sync=settings))
    for options, said in (
        ({"gradients": "int8"}, "give the codec to sync, or set its warmup_steps"),
        ({"replicas": group}, "or fully_shard with sync: remove it"),
    ):
        arguments = {"sync": {"every": 2}, **options}
        assert said in refusal(lambda arguments=arguments: attach(model, **arguments))
    differ = {"every": 2, "learning_rate": 0.5 + dist.get_rank(group) / 4}
    assert "learning_rate" in refusal(lambda: attach(ddp(group), sync=differ), PayloadError)
    assert "unused_parameters=False" in refusal(
        lambda: attach(ddp(group, Crossed), sync={"every": 2})
    )
    wide = DistributedDataParallel(network().double())
    assert "sync is for float32" in refusal(lambda: attach(wide, sync={"every": 2}))
    state = attach(ddp(group), sync={"every": 2}).state_dict()
    assert "attach with sync" in refusal(lambda: attach(ddp(group)).load_state_dict(state))
    assert "init_device_mesh" in refusal(lambda: attach(fsdp2(group), sync={"every": 2}))


@on_ranks(2)
def test_replicas_that_differ_are_refused_on_all_ranks(group):
    torch.manual_seed(dist.get_rank(group))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    model = fully_shard(nn.Linear(40, 31), mesh=mesh)
    _, optimizer = attached(model, 1)
    said = refusal(lambda: trained(model, group, 1, optimizer), PayloadError)
    assert "first parameters" in said and "load handle.state_dict()" in said


@pytest.mark.long
def test_a_rank_that_is_lost_between_exchanges_is_named():
    def worker(group):
        model = ddp(group)
        _, optimizer = attached(model, 2)
        stepped(model, optimizer, 3, group)
        if dist.get_rank(group) == 1:
            os._exit(0)
        stepped(model, optimizer, 1, group)

    line = (
        r"^crash: rank 0: RuntimeError: sync: rank 1 is lost at the synchronisation after step 4 "
    )
    with pytest.raises(RunFailed, match=rf"{line}[^\n]*$"):
        launch(worker, 2, threads=1, timeout_s=30)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"sync": {"every": 0}}, "attach: sync.every: input should be greater than or equal to 1"),
        ({"sync": {"codec": "int4"}}, "attach: sync.every: field required"),
        ({"sync": 32}, "attach: sync: input should be a mapping or a Sync (found 32)"),
        ({"optimizer": [None]}, "optimizer is NoneType"),
        ({"sync": {"every": 2, "codec": None}}, "attach: sync.codec: a codec is its name"),
        ({"sync": {"every": 2, "codec": "sign"}}, "'sign' votes, and outer gradients need means"),
        ({"sync": {"every": 2, "codec": "powersgd"}}, "'powersgd' sums in several phases"),
    ],
)
@on_ranks(2)
def test_options_that_mean_nothing_are_refused(group, arguments, reason):
    arguments = {"sync": {"every": 2}, **arguments}
    assert reason in refusal(lambda: shardlab.attach(ddp(group), **arguments))


@on_ranks(2)
def test_outer_gradients_that_are_dropped_are_named(group):
    """On the first rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for error_feedback in (False, True):
            attached(ddp(group), 8, codec="topk:density=0.5", error_feedback=error_feedback)
    said = [line for each in caught if "drops what" in (line := str(each.message))]
    few = "topk:density=0.5 drops what it does not send: fewer than 2 synchronisations cannot send"
    assert len(said) == (dist.get_rank(group) == 0)
    assert all(line.startswith(f"attach: sync: {few} all outer gradients") for line in said)
