"""DistributedDataParallel rebuilds its buckets: messages keep their layout, nothing is lost."""

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.comm.codec_collective import CodecCollective
from tests.comm.wrapped_models import Crossed, backward, batch, ddp, network
from tests.ranks import on_ranks


@pytest.mark.parametrize("make", [network, Crossed])
@on_ranks(1)
def test_layout_of_messages_does_not_depend_on_the_pass(group, make, monkeypatch):
    units = []

    def sending(self, vector, scale, unit, original=CodecCollective.all_reduce):
        units[-1].append(unit)
        original(self, vector, scale, unit)

    monkeypatch.setattr(CodecCollective, "all_reduce", sending)
    model = ddp(group, make, bucket_cap_mb=0.005)
    shardlab.attach(model, "int8", minimum_size=0)
    for step in range(3):
        units.append([])
        backward(model, group, step)
    assert units[0] == units[1] == units[2] and len(units[0]) > 1
    names = [block.name for unit in units[0] for block in unit.blocks]
    layers = [name for name, _ in make().named_children() if name != "1"][::-1]
    assert [name for name in names if "weight" in name] == [f"{x}.weight" for x in layers]


@pytest.mark.parametrize(
    ("route", "codec"), [("native", "none"), ("exchange", "none"), ("exchange", "bf16")]
)
@on_ranks(2)
def test_a_gradient_that_is_not_finite_shows_on_all_ranks(group, route, codec):
    """In the norm; payloads that decode to it are counted."""
    model = ddp(group)
    handle = shardlab.attach(model, codec, route=route, minimum_size=0)
    counts = []
    for bad in (False, True, False):
        x = batch(dist.get_rank(group), 0)
        if bad and dist.get_rank(group) == 1:
            x[0, 0] = float("inf")
        model(x).pow(3).mean().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert bool(norm.isfinite()) == (not bad)
        model.zero_grad()
        counts.append(handle.ledger.summary()["gradients"]["not_finite"])
    assert counts == ([0, 0, 0] if codec == "none" else [0, 1, 1])
