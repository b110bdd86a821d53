"""Device meshes, and engines that have one flat vector per unit, an equal part on every rank."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from shardlab.engines.autograd import AutogradEngine
from shardlab.strategy.document import CanonicalStrategy

SHARD, REPLICATE = "shard", "replicate"


def make_mesh(
    group: dist.ProcessGroup, replicas: int, device: torch.device, always: bool = False
) -> DeviceMesh:
    """Return a mesh [shards], or [replicas, shards] where there are several copies, or `always`.

    With several copies all ranks of the default group call it, also those outside of `group`.
    """
    if replicas == 1 and not always:
        return DeviceMesh.from_group(group, device.type, mesh_dim_names=(SHARD,))
    ranks = torch.tensor(dist.get_process_group_ranks(group)).view(replicas, -1)
    return DeviceMesh(device.type, ranks, mesh_dim_names=(REPLICATE, SHARD))


def mesh_replicas(strategy: CanonicalStrategy, group: dist.ProcessGroup) -> int:
    """Return the number of replicas of the model that the mesh of an engine has."""
    if strategy.traits.no_shard_in_place and strategy.sharding == "no_shard":
        return 1  # the wrapper averages over the ranks of one copy
    return strategy.replica_count(dist.get_world_size(group))


def mesh_replica_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shard of other copies, where there are some."""
    return mesh.get_group(REPLICATE) if mesh.ndim == 2 else None


class FlatVector(NamedTuple):
    """Parameters of a unit one after another, then padding up to equal parts."""

    shard: nn.Parameter
    """this rank's part"""
    shapes: Mapping[str, torch.Size]
    """of the parameters, by the names of the unwrapped model"""


class FlatEngine(AutogradEngine):
    """Engines whose optimizer sees one flat vector per unit, sharded as DTensors."""

    _mesh: DeviceMesh
    """[shards] or [replicas, shards]"""

    @abstractmethod
    def _vectors(self) -> dict[str, FlatVector]:
        """Return the vectors by the names of the units."""

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:  # noqa: D102
        return split_vector(whole, self._vectors()[name].shapes)

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: vector.shard for name, vector in self._vectors().items()}

    def _laid_out(self, name: str, local: Tensor) -> Tensor:
        if local.dim() == 0:
            return local
        elements = sum(shape.numel() for shape in self._vectors()[name].shapes.values())
        return laid_out(local, elements, self._mesh)


def laid_out(local: Tensor, elements: int, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a padded vector of so many elements as a DTensor.

    Args:
        mesh: [shards] or [replicas, shards].
    """
    first = mesh.get_local_rank(mesh.ndim - 1) * local.numel()
    placements = [*[Replicate()] * (mesh.ndim - 1), Shard(0)]
    inside = local[: max(0, elements - first)]
    shape, stride = torch.Size((elements,)), (1,)
    return DTensor.from_local(inside, mesh, placements, shape=shape, stride=stride)


def split_vector(whole: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return the parts of a vector by name; a single number is every part's."""
    return dict.fromkeys(shapes, whole) if whole.dim() == 0 else named_parts(whole, shapes)


def named_parts(whole: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return views of a vector in which tensors of these shapes lie one after another."""
    sizes = [shape.numel() for shape in shapes.values()]
    pieces = whole[: sum(sizes)].split(sizes)
    return {
        name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)
    }
