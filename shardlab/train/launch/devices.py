"""Which device a rank computes on, and so which backend its process group needs."""

import os
from collections.abc import Sequence

import torch


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


def backend_of(gpus: Sequence[str]) -> str:
    """NCCL, with gloo for what lies in main memory, if every rank has a GPU of its own; else gloo.

    Args:
        gpus: what `take_gpu` returned on every rank.
    """
    own = all(gpus) and len(set(gpus)) == len(gpus)
    return "cpu:gloo,cuda:nccl" if own else "gloo"
