"""GPU of a rank in a process group that somebody else's script has made."""

import os
import platform

import torch
import torch.distributed as dist

from shardlab.comm.object_collectives import gather_values, run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.core.gpus import RankGpu, gpu_index, usable_gpu


def own_gpu(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Make the GPU of this rank the current one; all ranks of the group call together.

    Args:
        device: `cuda` for the GPU of LOCAL_RANK, unless the program has made another one current;
            with an index: that GPU.
        group: of gloo: NCCL itself fails, with a message of its own, where ranks share a GPU.

    Returns:
        The device with its index.

    Raises:
        UserError: the GPU cannot be used; or ranks share one, on all of them.
    """
    index, gpu = run_or_fail_together(group, "GPUs cannot be used", lambda: _named(device))
    gpus = gather_values(f"{platform.node()} {gpu.uuid}", group)
    for name in gpus:
        ranks = [rank for rank, each in enumerate(gpus) if each == name]
        if len(ranks) > 1:
            raise UserError(
                f"ranks {', '.join(map(str, ranks))} share GPU {name}: start one rank for each "
                "GPU, or call torch.cuda.set_device on each first"
            )
    return torch.device(device.type, index)


def _named(device: torch.device) -> tuple[int, RankGpu]:
    index = device.index
    if index is None:
        # the current one; nothing may be asked of CUDA before it is known to work
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        if index == 0 and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
            index = gpu_index(torch.cuda.device_count(), forked=False) or 0
    return index, usable_gpu(index)
