"""SlideFSDP and LayerAdam with a GPU: a model larger than its memory, checkpoints, updates."""

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import GPT2LMHeadModel

import shardlab
from shardlab.models.build import shape_config
from shardlab.models.settings import Shape
from tests.gpu.devices import capped, on_devices, on_devices_long, own_device
from tests.ranks import on_ranks

VOCABULARY, CAP_GIB = 2048, 1.6
LARGE, SMALL = Shape(24, 1024, 16), Shape(3, 64, 4)


def gpt2(shape: Shape, length: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(shape_config(shape, VOCABULARY, length, 0)).train()


def batches_of(length: int, count: int) -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    batches = [torch.randint(VOCABULARY, (4, length), generator=drawn) for _ in range(count)]
    return [{"input_ids": batch, "labels": batch} for batch in batches]


def plain_losses(model, batches, device: torch.device) -> list[float]:
    model, losses = model.to(device), []
    options = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(model.parameters(), **options, fused=True)
    for batch in batches:
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_devices
@pytest.mark.fresh_ranks
@on_ranks(1)
def test_a_model_larger_than_the_memory_trains_as_one_that_fits(device) -> None:
    where, large = own_device(device), device == "cuda"
    shape, length = (LARGE, 256) if large else (SMALL, 32)
    torch.set_num_threads(4 if large else 1)
    batches = batches_of(length, 4)
    expected = plain_losses(gpt2(shape, length), batches, where)
    if large:
        capped(CAP_GIB)
        with pytest.raises(torch.OutOfMemoryError):
            plain_losses(gpt2(shape, length), batches, where)
        capped(CAP_GIB)
    strategy = {"param_dtype": "fp32", "activation_checkpointing": "full"}
    sliding = shardlab.SlideFSDP(gpt2(shape, length), strategy, device=device)
    losses = [float(sliding(batch).loss) for batch in batches]
    torch.testing.assert_close(losses, expected, rtol=2e-4, atol=0)


@on_devices_long
@pytest.mark.parametrize(
    ("strategy", "clip"),
    [({}, None), ({"accumulation": 2}, 1.0), ({"moment_dtype": "bf16"}, 1.0)],
    ids=str,
)
@on_ranks(1)
def test_sliding_continues_bit_for_bit(device, strategy, clip, tmp_path) -> None:
    numbers = {"learning_rate": 1e-3, "clip": clip, "device": device}
    batches = batches_of(32, 8)

    def losses(sliding) -> list[float]:
        return [float(sliding(batch).loss) for batch in batches[4:]]

    first = shardlab.SlideFSDP(gpt2(SMALL, 32), strategy, **numbers)
    for batch in batches[:4]:
        first(batch)
    first.save(tmp_path / "saved")
    expected = losses(first)
    second = shardlab.SlideFSDP(gpt2(SMALL, 32), strategy, **numbers)
    second.load(tmp_path / "saved")
    with torch.no_grad():
        second(batches[0])
    assert losses(second) == expected


@on_devices
@on_ranks(1)
def test_updates_on_the_host_train_a_model_on_the_device(device) -> None:
    where = own_device(device)
    torch.manual_seed(1)
    model, expected = (
        nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 128)).to(where)
        for _ in range(2)
    )
    expected.load_state_dict(model.state_dict())
    host = {}
    for name, parameter in model.named_parameters():
        copy = parameter.detach().to("cpu", copy=True)
        host[name] = nn.Parameter(copy.pin_memory() if device == "cuda" else copy)
    layers = [{"name": name, "params": [parameter]} for name, parameter in host.items()]
    optimizer = shardlab.LayerAdam(layers, lr=1e-3)
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-3)
    for step in range(5):
        x = torch.randn(32, 256, generator=torch.Generator().manual_seed(step)).to(where)
        for network in (model, expected):
            network(x).pow(2).mean().backward()
        for name, parameter in model.named_parameters():
            host[name].grad = parameter.grad.cpu()
            optimizer.step(layer=name)
            parameter.data.copy_(host[name], non_blocking=True)
            parameter.grad = None
        if device == "cuda":
            torch.cuda.synchronize()  # the next update writes to what is still being copied
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
