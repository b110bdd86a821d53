"""GPU of a rank, and the backend of the process group that follows from the GPUs of all."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from shardlab.hardware.topology import node_of_pci


def gpu_index(visible: int, *, forked: bool) -> int | None:
    """Return the index of the rank's own GPU among those that its process sees.

    Args:
        visible: GPUs that the process sees: those of the machine, or what a launcher left of them.
        forked: whether the other ranks of the machine see the same GPUs, as forks of one process.

    Returns:
        None when the ranks would have to share one.
    """
    if visible >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return int(os.environ["LOCAL_RANK"])
    return 0 if visible and not forked else None


def take_gpu(*, forked: bool) -> str:
    """Make the rank's own GPU the current one, in the process of the rank.

    CUDA does not survive a fork.

    Returns:
        Its UUID; empty without a GPU of its own.
    """
    index = gpu_index(torch.cuda.device_count(), forked=forked)
    if index is None:
        return ""
    torch.cuda.set_device(index)
    return str(torch.cuda.get_device_properties(index).uuid)


def gpu_node() -> int | None:
    """Return the NUMA node of the current GPU; None without one, or where sysfs has no node."""
    if not torch.cuda.is_initialized():
        return None
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return node_of_pci(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def backend_of(gpus: Sequence[str]) -> str:
    """Return NCCL, with gloo for host memory, if every rank has its own GPU; otherwise gloo.

    Args:
        gpus: UUIDs from `take_gpu`, of every rank.
    """
    own = all(gpus) and len(set(gpus)) == len(gpus)
    return "cpu:gloo,cuda:nccl" if own else "gloo"
