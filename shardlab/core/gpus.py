"""GPU of a rank, checked before training, and the backend that the GPUs of all ranks allow.

A GPU that cannot be used ends the run in one line, before there is a process group.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab.core.errors import UserError

_CHOOSE = "choose others by CUDA_VISIBLE_DEVICES"
_INSTALLED = Path("/proc/driver/nvidia/gpus")
"""one folder per GPU; the driver makes it"""


def gpu_index(visible: int, *, forked: bool) -> int | None:
    """Return the index of this rank's GPU, or None when ranks would have to share one.

    Args:
        visible: GPUs that the process sees: those of the machine, or what a launcher left of them.
        forked: whether the other ranks of the machine see the same GPUs, as forks of one process.
    """
    if visible >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return int(os.environ["LOCAL_RANK"])
    return 0 if visible and not forked else None


def take_gpu(*, forked: bool) -> str | None:
    """Make this rank's GPU the current one, in its process; return its UUID, or None without one.

    Raises:
        UserError: torch cannot compute on it.
    """
    index = gpu_index(torch.cuda.device_count(), forked=forked)
    return None if index is None else usable_gpu(index)


def usable_gpu(index: int) -> str:
    """Make this GPU the current one; return its UUID.

    Raises:
        UserError: it is busy, full or too old, or the driver is.
    """
    try:
        torch.cuda.init()
        torch.cuda.set_device(index)
        # a busy or full GPU refuses the context, and one that torch has no code for the kernel
        torch.ones(1, device="cuda").add_(1).item()
    except (RuntimeError, AssertionError) as error:
        line = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(
            f"GPU {index}: cannot be used ({line}): see what nvidia-smi says, or {_CHOOSE}"
        ) from error
    return str(torch.cuda.get_device_properties(index).uuid)


def backend_of(gpus: Sequence[str | None]) -> str:
    """Return NCCL, with gloo for host memory, if every rank has its own GPU; otherwise gloo.

    Args:
        gpus: from `take_gpu`, of every rank.

    Raises:
        UserError: there is no NCCL.
    """
    if None in gpus or len({*gpus}) < len(gpus):
        return "gloo"
    if not dist.is_nccl_available():
        raise UserError(
            f"torch {torch.__version__} has no NCCL, which GPUs need: install a build with it "
            "(PyPI's for Linux), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    return "cpu:gloo,cuda:nccl"


def why_on_cpu(world_size: int) -> str | None:
    """Return why ranks train on the CPU of a machine with GPUs, in one line; None if it has none.

    Args:
        world_size: number of ranks that use gloo.
    """
    visible = torch.cuda.device_count()
    if visible:
        return f"{world_size} ranks share {visible} GPUs: they train on the CPU"
    installed = len([*_INSTALLED.glob("*")])
    if not installed or "CUDA_VISIBLE_DEVICES" in os.environ:
        return None
    reason = "CUDA finds none of them: see what nvidia-smi says"
    if not torch.backends.cuda.is_built():
        reason = "is built without CUDA: docs/how-to/gpus.md says how to install one that has it"
    return f"{installed} GPUs, but torch {torch.__version__}: {reason}: ranks train on the CPU"
