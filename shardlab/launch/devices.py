"""Which device a rank computes on, and so which backend its process group needs."""

import os
from collections.abc import Sequence
from typing import Any

import torch

from shardlab.hardware.topology import node_of_pci


def gpu_index(visible: int, ranks_in_command: int, place_in_command: int) -> int | None:
    """The number of the rank's own GPU among those that its process sees; None without one.

    A launcher shows a process the GPUs of the machine, or only those of its own ranks.

    Args:
        visible: GPUs that the process sees.
    """
    if visible >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return int(os.environ["LOCAL_RANK"])
    return place_in_command if visible >= ranks_in_command else None


def take_gpu(ranks_in_command: int, place_in_command: int) -> str:
    """Makes the rank's own GPU the current one.

    To be called in the process of the rank: CUDA does not outlive a fork.

    Returns:
        Its UUID; empty without a GPU of its own.
    """
    index = gpu_index(torch.cuda.device_count(), ranks_in_command, place_in_command)
    if index is None:
        return ""
    torch.cuda.set_device(index)
    return str(torch.cuda.get_device_properties(index).uuid)


def gpu_node() -> int | None:
    """The NUMA node of the GPU that `take_gpu` took; None without, or where nobody says."""
    if not torch.cuda.is_initialized():
        return None
    of: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return node_of_pci(f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0")


def backend_of(gpus: Sequence[str]) -> str:
    """NCCL, with gloo for what lies in host memory, if every rank has a GPU of its own; else gloo.

    Args:
        gpus: what `take_gpu` returned on every rank.
    """
    own = all(gpus) and len(set(gpus)) == len(gpus)
    return "cpu:gloo,cuda:nccl" if own else "gloo"
