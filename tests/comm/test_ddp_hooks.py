"""DistributedDataParallel rebuilds its buckets: messages keep their layout, nothing is lost."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.comm.codec_collective import CodecCollective
from tests.comm.wrapped_models import backward, batch, network
from tests.ranks import on_ranks


class Crossed(nn.Module):
    """Runs its layers in another order than it lists them, and skips one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(60, 31)
        self.first = nn.Linear(40, 50)
        self.unused = nn.Linear(20, 20)
        self.middle = nn.Linear(50, 60)

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu())


def plain():
    return network()


def wrap(make, **options):
    unused = make is Crossed
    return DistributedDataParallel(
        make(), bucket_cap_mb=0.005, find_unused_parameters=unused, **options
    )


def passes(model, group, steps):
    """The gradients of all passes, [passes, n]."""
    result = []
    for step in steps:
        model.zero_grad()
        backward(model, group, step)
        result.append(gradient(model))
    return torch.stack(result)


def gradient(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("make", [plain, Crossed])
@on_ranks(2)
def test_error_feedback_conserves_gradients(group, make, views):
    steps = range(4)
    exact = passes(wrap(make), group, steps).sum(0)
    model = wrap(make, gradient_as_bucket_view=views)
    handle = shardlab.attach(model, "topk:density=0.2", error_feedback=True, minimum_size=0)
    sent = passes(model, group, steps).sum(0)
    assert handle.ledger.summary()["gradients"]["uncompressed"] == {}
    # residuals are sent with a gradient of zeros, by a codec that drops nothing
    other = wrap(make, gradient_as_bucket_view=views)
    last = shardlab.attach(other, "topk:density=1.0", error_feedback=True, minimum_size=0)
    last.load_state_dict(handle.state_dict())
    (other(batch(dist.get_rank(group), 0)).sum() * 0).backward()
    assert last.feedback.norm() == 0 and gradient(other).norm() > 0
    torch.testing.assert_close(sent + gradient(other), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [plain, Crossed])
@on_ranks(1)
def test_layout_of_messages_does_not_depend_on_the_pass(group, make, monkeypatch):
    units = []

    def sending(self, vector, scale, unit, original=CodecCollective.all_reduce):
        units[-1].append(unit)
        original(self, vector, scale, unit)

    monkeypatch.setattr(CodecCollective, "all_reduce", sending)
    model = wrap(make)
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
    model = DistributedDataParallel(network())
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
