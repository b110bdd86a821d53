"""Trains by Accelerate or Fabric over FSDP2, with LayerAdam and with torch's AdamW, and compares.

torchrun --nproc-per-node 2 wrapped_layer_adam.py accelerate|fabric
"""

import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardlab


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def by_accelerate(make):
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=100,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # Accelerate turns to DDP on CPUs: ask for FSDP again
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = network()
    model, optimizer = accelerator.prepare(model, make(model.parameters()))
    return model, optimizer, accelerator.backward


def by_fabric(make):
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def shard(model, mesh):
        return fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(network())
    return model, fabric.setup_optimizers(make(model.parameters())), fabric.backward


def trained(wrap, make, layered):
    model, optimizer, backward = wrap(make)
    for step in range(6):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        backward(model(x).square().mean())
        if layered and step % 2:
            optimizer.optimizer.step(layer=0)
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) and p.to_local().shape != p.shape for p in model.parameters())
    return [p.full_tensor() for p in model.parameters()]


wrap = {"accelerate": by_accelerate, "fabric": by_fabric}[sys.argv[1]]
found = trained(wrap, lambda p: shardlab.LayerAdam(p, 0.01), layered=True)
expected = trained(wrap, lambda p: torch.optim.AdamW(p, 0.01, fused=True), layered=False)
assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
assert not any(torch.equal(p, q) for p, q in zip(found, network().parameters(), strict=True))
