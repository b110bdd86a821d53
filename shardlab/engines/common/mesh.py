"""Ranks as copies of a model, each sharded over neighbouring ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab.strategy.strategy import Strategy

SHARD, REPLICATE = "shard", "replicate"


def make_mesh(group: dist.ProcessGroup, replicas: int, device: torch.device) -> DeviceMesh:
    """[shards], or [replicas, shards] where there are several copies.

    All ranks of the default group call it with several copies, also those outside of `group`.
    """
    if replicas == 1:
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=(SHARD,))
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(replicas, -1)
    return DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICATE, SHARD))


def copies(strategy: Strategy, group: dist.ProcessGroup) -> int:
    """Copies of the model by a strategy's canonical form; with `no_shard` one per rank."""
    if strategy.sharding == "no_shard":
        return dist.get_world_size(group)
    return strategy.replicas or 1


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The ranks that hold the same shard of other copies."""
    return mesh.get_group(REPLICATE) if mesh.ndim == 2 else None
