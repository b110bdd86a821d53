"""`shardlab.attach` on models that other people's code wrapped."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.core.errors import UserError


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 30))


def fsdp2(group):
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def ddp(group):
    return DistributedDataParallel(network())


def gradients_after(model, group, passes):
    for i in range(passes):
        model.zero_grad()
        generator = torch.Generator().manual_seed(10 * i + dist.get_rank(group))
        model(torch.randn(8, 40, generator=generator)).square().mean().backward()
    grads = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        for p in model.parameters()
    ]
    return torch.cat([grad.flatten() for grad in grads])


@pytest.mark.parametrize("wrap", [fsdp2, ddp])
def test_three_lines_compress_somebody_elses_model(wrap):
    def on_rank(group):
        exact = gradients_after(wrap(group), group, 2)
        model = wrap(group)
        handle = shardlab.attach(model, gradients="int8:group=64", minimum_size=100)
        lossy = gradients_after(model, group, 1)
        handle.ledger.reset()
        lossy = gradients_after(model, group, 2)
        summary = handle.ledger.summary()["gradients"]
        handle.detach()
        restored = gradients_after(model, group, 2)
        ratio = torch.tensor(summary["compression_ratio"])
        return {"exact": exact, "lossy": lossy, "restored": restored, "ratio": ratio}

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["lossy"], second["lossy"])
    assert torch.equal(first["restored"], first["exact"])
    error = (first["lossy"] - first["exact"]).norm() / first["exact"].norm()
    assert 0 < error < 0.02
    # fsdp2 pads every unit to whole rows per rank, ddp's first bucket is not compressed
    assert first["ratio"] > 3


def test_residuals_are_saved_and_taken_back():
    def on_rank(group):
        model = fsdp2(group)
        handle = shardlab.attach(model, "topk:density=0.1", error_feedback=True, minimum_size=0)
        gradients_after(model, group, 2)
        state = {name: residual.clone() for name, residual in handle.state_dict().items()}
        straight = gradients_after(model, group, 3)
        other = fsdp2(group)
        fresh = shardlab.attach(other, "topk:density=0.1", error_feedback=True, minimum_size=0)
        fresh.load_state_dict(state)
        return {"straight": straight, "resumed": gradients_after(other, group, 3)}

    for result in run_ranks(2, on_rank):
        assert torch.equal(result["straight"], result["resumed"])


def test_a_model_that_is_not_wrapped_is_refused():
    with pytest.raises(UserError, match="wrapped neither by fully_shard nor"):
        shardlab.attach(network(), gradients="int8")


def test_a_codec_that_cannot_be_summed_is_refused_on_the_native_route():
    with pytest.raises(UserError, match="cannot be summed"):
        shardlab.attach(network(), gradients="int8", route="native")
