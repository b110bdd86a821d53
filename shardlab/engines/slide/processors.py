"""Which processors update."""

import os

import torch
import torch.distributed as dist

from shardlab.comm.gather import gather_values
from shardlab.kernels.workers import Workers


def update_workers(here: dist.ProcessGroup, device: torch.device) -> Workers | None:
    """Pinned threads for the kernels of this rank; None where the calling thread does for it.

    Beside a GPU all processors of the rank but one, which launches; torchrun allows torch a single
    thread. On a CPU, which computes as well, as many as torch computes with.

    Args:
        here: the ranks of the node, which all call it.
    """
    mine = shared_out(here)
    threads = max(1, len(mine) - 1) if device.type == "cuda" else torch.get_num_threads()
    return Workers(threads, mine[::-1]) if threads > 1 else None


def shared_out(here: dist.ProcessGroup) -> list[int]:
    """The processors that this rank may run on, divided among those ranks that share them all."""
    own = sorted(os.sched_getaffinity(0))
    alike = [rank for rank, mask in enumerate(gather_values(own, here)) if mask == own]
    place, count = alike.index(dist.get_rank(here)), len(alike)
    part = own[len(own) * place // count : len(own) * (place + 1) // count]
    return part or [own[place % len(own)]]
