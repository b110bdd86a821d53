"""Which processors update."""

from dataclasses import asdict

import torch
import torch.distributed as dist

from shardlab.hardware.placement import RankLocation, place_here
from shardlab.kernels.workers import Workers
from shardlab.transport.object_collectives import gather_values


def update_workers(here: dist.ProcessGroup, device: torch.device) -> Workers | None:
    """Pinned threads for the kernels of this rank; None where the calling thread does for it.

    Beside a GPU they are all that the rank's placement has for workers: torchrun allows torch a
    single thread. On a CPU, which computes as well, they are as many as torch computes with, on
    the same processors.

    Args:
        here: the ranks of the node, which all call it.
    """
    everyone = [
        RankLocation(**each) for each in gather_values(asdict(RankLocation.here(None)), here)
    ]
    placement = place_here(everyone)[dist.get_rank(here)]
    on_gpu = device.type == "cuda"
    processors = placement.workers if on_gpu else placement.cpus
    threads = len(processors) if on_gpu else torch.get_num_threads()
    return Workers(threads, processors) if threads > 1 else None
