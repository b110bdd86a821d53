"""Gathering of the trained model on rank 0, and the comparison of all replicas."""

import zlib

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.checkpoint.state_files import in_host_memory
from shardlab.engines.common.base import Engine

_PIECE = 2**20
"""elements"""


def gather_trained(engine: Engine, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Return the whole model by name on rank 0; the others hold one unit of the engine at a time.

    Raises:
        RuntimeError: the ranks hold different parameters.
    """
    whole: dict[str, Tensor] = {}
    checksums: dict[str, int] = {}
    for parts in engine.whole_parameters():
        checksums |= {name: _checksum(tensor) for name, tensor in parts.items()}
        if dist.get_rank(group) == 0:
            whole |= in_host_memory(parts)
        del parts  # frees them before the next are allocated
    _check_equal(checksums, group)
    return whole


def _checksum(tensor: Tensor) -> int:
    checksum = 0
    for piece in tensor.reshape(-1).split(_PIECE):
        # a copy: the engine cannot free storage that numpy refers to
        copied = piece.to("cpu", copy=True).view(torch.uint8)
        checksum = zlib.crc32(copied.numpy(), checksum)
    return checksum


def _check_equal(checksums: dict[str, int], group: dist.ProcessGroup) -> None:
    """Compare checksums between ranks: no loss curve shows replicas that have diverged."""
    highest = torch.tensor([*checksums.values()])
    lowest = highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    names = [n for n, same in zip(checksums, highest == lowest, strict=True) if not same]
    if names:
        raise RuntimeError(f"ranks hold different parameters after training: {names[:3]}")
