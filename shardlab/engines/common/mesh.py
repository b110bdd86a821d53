"""Device meshes: ranks as copies of a model, each sharded over neighbouring ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlab.strategy.strategy import CanonicalStrategy

SHARD, REPLICATE = "shard", "replicate"


def make_mesh(group: dist.ProcessGroup, replicas: int, device: torch.device) -> DeviceMesh:
    """Return a mesh [shards], or [replicas, shards] where there are several copies.

    With several copies all ranks of the default group call it, also those outside of `group`.
    """
    if replicas == 1:
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=(SHARD,))
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(replicas, -1)
    return DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICATE, SHARD))


def mesh_copies(strategy: CanonicalStrategy, group: dist.ProcessGroup) -> int:
    """Return the number of copies of the model that the mesh of an engine has."""
    if strategy.traits.no_shard_in_place and strategy.sharding == "no_shard":
        return 1  # the wrapper averages over the ranks of one copy
    return strategy.copies(dist.get_world_size(group))


def replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shard of other copies, where there are some."""
    return mesh.get_group(REPLICATE) if mesh.ndim == 2 else None
