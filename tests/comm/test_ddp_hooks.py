"""DistributedDataParallel rebuilds its buckets, and leaves alone what no rank uses: messages
keep their layout, and nothing is lost."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.comm.codec_collective import CodecCollective
from shardlab.comm.feedback import widen
from tests.comm.replicas import attached, flat, refusal
from tests.comm.wire import gathered, is_same_everywhere
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
    shardlab.attach(model, {"codec": "int8", "minimum_size": 0})
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
    handle = shardlab.attach(model, {"codec": codec, "route": route, "minimum_size": 0})
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


SIZE = 40


class Branches(nn.Module):
    """Of two matrices the second is used where it is asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))

    def forward(self, x, uses):
        loss = self.always(x).square().mean()
        return loss + self.sometimes(x).pow(3).mean() if uses else loss


def gradient(rank, step):
    """That of the second matrix on a rank."""
    model, x = Branches(), torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))
    model(x * (rank + 1), True).backward()
    return model.sometimes.weight.grad


def owed(handle, group):
    """Return the sum that the residuals of all ranks owe to the gradient of the second matrix."""
    state = {name.partition(".residual.")[2]: t for name, t in handle.state_dict().items()}
    sent = [state[key] for key in ("bucket0*", "bucket0>0", "bucket0>1") if key in state]
    total = sum(gathered(torch.cat([widen(part) for part in sent]), group)) / 2
    if "bucket0<" in state:
        total = total + torch.cat(gathered(widen(state["bucket0<"]), group))
    return total


# in one message with the other matrix, or in one of its own
@pytest.mark.parametrize("size", [25, 0.001])
@pytest.mark.parametrize("codec", ["topk:density=0.02", "int4", "efsign", "powersgd:rank=1"])
@pytest.mark.parametrize("residual", ["fp32", "int8"])
@on_ranks(2)
def test_true_gradients_are_those_applied_and_what_residuals_owe(group, codec, size, residual):
    rank = dist.get_rank(group)
    for uses in ([1, 0, 0, 0], [1, 0, 1, 0]):
        options = {"find_unused_parameters": True, "bucket_cap_mb": size}
        model = DistributedDataParallel(Branches(), **options)
        gradients = {"codec": codec, "error_feedback": True, "residual": residual}
        handle = shardlab.attach(model, gradients)
        weight, true, applied = model.module.sometimes.weight, 0, 0
        for step, used in enumerate(uses):
            x = torch.randn(8, SIZE, generator=torch.Generator().manual_seed(step))
            model(x * (rank + 1), used).backward()
            # one rank's zeros are no other rank's: DDP writes what some rank has
            applied = applied + (0 if weight.grad is None else weight.grad)
            true = true + (sum(gradient(r, step) for r in range(2)) / 2 if used else 0)
            model.zero_grad()
        rest = (true - applied - owed(handle, group)[: SIZE * SIZE].view(SIZE, SIZE)).norm()
        assert rest < (1e-5 if residual == "fp32" else 0.05) * true.norm(), uses


def trained_in_join(model, group, batches, optimizer=None, **options):
    """Train each rank on as many batches as are listed for it."""
    rank = dist.get_rank(group)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.05)
    with model.join(**options):
        for step in range(batches[rank]):
            optimizer.zero_grad()
            backward(model, group, step)
            optimizer.step()


# the third rank has none
BATCHES = 4, 2, 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradients": {"codec": "int8", "error_feedback": True, "minimum_size": 0}},
        {"gradients": {"codec": "powersgd:rank=31", "error_feedback": True, "minimum_size": 0}},
    ],
    ids=str,
)
@on_ranks(3)
def test_ranks_without_batches_send_zeros_in_join(group, settings):
    model, exact, alone = ddp(group, bucket_cap_mb=0.005), network(), network()
    shardlab.attach(model, **settings)
    trained_in_join(model, group, BATCHES)
    inner = torch.optim.SGD(exact.parameters(), 0.05)
    for step in range(max(BATCHES)):
        inner.zero_grad()
        losses = [exact(batch(r, step)).pow(3).mean() for r in range(3) if step < BATCHES[r]]
        (sum(losses) / 3).backward()
        inner.step()
    trained = [torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, exact)]
    begun = torch.cat([p.detach().flatten() for p in alone.parameters()])
    assert (trained[0] - trained[1]).norm() < 0.02 * (trained[1] - begun).norm()


@pytest.mark.parametrize("settings", [{}, {"gradients": "int8"}], ids=str)
@pytest.mark.parametrize("detaches", [False, True])
@on_ranks(3)
def test_a_mean_over_ranks_with_batches_alone_is_refused(group, settings, detaches):
    model = ddp(group)
    handle = shardlab.attach(model, **settings)
    if detaches:  # torch keeps the hook
        handle.detach()
    options = {"divide_by_initial_world_size": False}
    said = refusal(lambda: trained_in_join(model, group, BATCHES, **options))
    assert "call join() without it" in said


@pytest.mark.parametrize("outer", [{}, {"warmup_steps": 3}], ids=str)
@on_ranks(3)
def test_exchanges_refuse_that_ranks_end_early(group, outer):
    model = ddp(group)
    _, optimizer = attached(model, 2, **outer)
    said = refusal(lambda: trained_in_join(model, group, BATCHES, optimizer))
    assert "join(throw_on_early_termination=True)" in said


@on_ranks(2)
def test_replicas_that_end_together_in_join_are_averaged(group):
    model = ddp(group)
    handle, optimizer = attached(model, 2)
    with pytest.raises(RuntimeError, match="exhausted"):
        trained_in_join(model, group, (5, 3), optimizer, throw_on_early_termination=True)
    assert "1 step since they were last equal" in str(handle)
    handle.synchronize()
    assert is_same_everywhere(flat(model), group)
