"""Equality of the parameters that several ranks hold: no loss curve shows that they differ."""

from collections import Counter
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import UserError
from shardlab.engines.base import Engine

REPLICA_CHECK_EVERY = 100
"""steps; checksums read the parameters once, which a step does many times"""
_INTEGERS = {4: torch.int32, 8: torch.int64}


def check_replicas(engine: Engine, step: int, group: dist.ProcessGroup) -> None:
    """Compare what every rank holds, wherever another rank should hold the same.

    Raises:
        UserError: on all ranks: names the ranks that differ.
    """
    checksums: dict[str, int] = {}
    for name, tensor in engine.replicas().items():
        checksums[f"{name} {_shard(tensor)}"] = checksum(
            tensor.to_local() if isinstance(tensor, DTensor) else tensor
        )
    check_equal(checksums, f"after {step} steps", group)


def _shard(tensor: Tensor) -> list[int]:
    """Return which part of the whole tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return []
    place = tensor.device_mesh.get_coordinate()
    assert place is not None, "every rank is in the mesh"
    sharded = (isinstance(each, Shard) for each in tensor.placements)
    return [index for index, kept in zip(place, sharded, strict=True) if kept]


def checksum(tensor: Tensor) -> int:
    """Return the sum of the bits of all elements as integers, which wraps around."""
    bits = tensor.detach().reshape(-1)
    integers = _INTEGERS.get(bits.element_size())
    if integers is None:
        return int(bits.view(torch.uint8).sum())
    return int(bits.view(integers).sum(dtype=integers))


def check_equal(checksums: Mapping[str, int], when: str, group: dist.ProcessGroup) -> None:
    """Compare the checksums of each name over the ranks that have it.

    Raises:
        UserError: on all ranks: names the ranks that differ from most of them.
    """
    ranks = gather_values(dict(checksums), group)
    for name in dict.fromkeys(name for each in ranks for name in each):
        found = {rank: each[name] for rank, each in enumerate(ranks) if name in each}
        (usual, _), *others = Counter(found.values()).most_common()
        if others:
            odd = [str(rank) for rank, value in found.items() if value != usual]
            raise UserError(
                f"{when} rank {', '.join(odd)} holds other values of {name.partition(' ')[0]} than "
                f"rank {next(rank for rank, value in found.items() if value == usual)}: train "
                "again; if it repeats, try the strategy without its codec, and test the memory"
            )
