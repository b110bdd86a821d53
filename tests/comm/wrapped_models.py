"""One small model, wrapped in each of torch's ways by code that knows nothing of shardlab."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

needs_torch_2_13 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"), reason="fully_shard of torch 2.13"
)


def network() -> nn.Module:
    """Three layers, of which the rows of one do not divide by two."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 60), nn.ReLU(), nn.Linear(60, 31), nn.LayerNorm(31))


def fsdp2(group: dist.ProcessGroup) -> nn.Module:
    model = network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def fsdp2_columns(group: dist.ProcessGroup) -> nn.Module:
    """Matrices are cut along their second dimension, where that is even."""
    size = dist.get_world_size(group)
    return fully_shard(
        network(),
        shard_placement_fn=lambda p: Shard(int(p.dim() > 1 and p.shape[-1] % size == 0)),
    )


def hsdp(group: dist.ProcessGroup) -> nn.Module:
    """Two replicas, each sharded over half of the ranks."""
    half = dist.get_world_size(group) // 2
    return fully_shard(
        network(), mesh=init_device_mesh("cpu", (2, half), mesh_dim_names=("r", "s"))
    )


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


def ddp(
    group: dist.ProcessGroup, make: Callable[[], nn.Module] = network, **options: Any
) -> nn.Module:
    return DistributedDataParallel(make(), find_unused_parameters=make is Crossed, **options)


def fsdp1(group: dist.ProcessGroup, strategy: ShardingStrategy | None = None) -> nn.Module:
    return FullyShardedDataParallel(
        network(),
        group,
        strategy or ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )


WRAPPERS = {
    "fsdp2": fsdp2,
    "fsdp2-columns": fsdp2_columns,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp1-replicated": functools.partial(fsdp1, strategy=ShardingStrategy.NO_SHARD),
}


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(model: nn.Module, group: dist.ProcessGroup, step: int) -> None:
    model(batch(dist.get_rank(group), step)).pow(3).mean().backward()


def full(model: nn.Module, what: str) -> dict[str, torch.Tensor]:
    """Whole parameters (`data`) or gradients (`grad`) by their plain names, on every rank."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return _read(model, what)
    return _read(model, what)


def _read(model: nn.Module, what: str) -> dict[str, torch.Tensor]:
    result = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if what == "grad" else parameter.detach()
        if value is None:
            continue
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        plain = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
        result[plain] = value.clone()
    return result


def gradients_after(model: nn.Module, group: dist.ProcessGroup, passes: int) -> torch.Tensor:
    """The last of `passes` gradients, flat."""
    for step in range(passes):
        model.zero_grad()
        backward(model, group, step)
    return torch.cat([grad.flatten() for grad in full(model, "grad").values()])
