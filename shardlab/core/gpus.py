"""GPU of a rank, checked before training, and the backend that the GPUs of all ranks allow.

A GPU that cannot be used ends the run with one line, before the process group is initialized.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardlab.core.errors import UserError

_CHOOSE = "choose others by CUDA_VISIBLE_DEVICES"
_INSTALLED = Path("/proc/driver/nvidia/gpus")
"""Folder of the driver, with one folder per GPU."""


class RankGpu(NamedTuple):
    """Properties of a rank's GPU that ranks compare."""

    uuid: str
    bf16: bool
    """Whether products in bf16 are fast, on which `auto` dtypes depend."""


def gpu_index(visible: int, *, forked: bool) -> int | None:
    """Return the index of this rank's GPU, or None when ranks would have to share one.

    Args:
        visible: Number of GPUs that the process sees; a launcher may hide some.
        forked: Whether the ranks of the machine see the same GPUs, as forks of one process.
    """
    if visible >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return int(os.environ["LOCAL_RANK"])
    return 0 if visible and not forked else None


def take_gpu(*, forked: bool) -> RankGpu | None:
    """Make this rank's GPU the current one, in the process of the rank; None without one.

    Raises:
        UserError: torch cannot compute on it.
    """
    index = gpu_index(torch.cuda.device_count(), forked=forked)
    return None if index is None else usable_gpu(index)


def usable_gpu(index: int) -> RankGpu:
    """Make this GPU the current one.

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
    bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return RankGpu(str(torch.cuda.get_device_properties(index).uuid), bf16)


def backend_of(gpus: Sequence[RankGpu | None]) -> str:
    """Return NCCL, with gloo for host memory, if every rank has its own GPU; otherwise gloo.

    Args:
        gpus: from `take_gpu`, of every rank.

    Raises:
        UserError: there is no NCCL, or dtypes would differ.
    """
    bf16_by_uuid = {gpu.uuid: gpu.bf16 for gpu in gpus if gpu is not None}
    if len(bf16_by_uuid) < len(gpus):
        return "gloo"
    if not dist.is_nccl_available():
        raise UserError(
            f"torch {torch.__version__} has no NCCL, which GPUs need: install a build with it "
            "(PyPI's for Linux), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
        )
    if len({*bf16_by_uuid.values()}) > 1:
        raise UserError(f"unequal GPUs: some have no bf16, so that dtypes differ: {_CHOOSE}")
    return "cpu:gloo,cuda:nccl"


def refuse_shared(gpus: Sequence[RankGpu], fix: str) -> None:
    """Refuse a GPU that several ranks share, with which NCCL hangs or fails.

    Args:
        gpus: GPU of every rank.
        fix: What else the user can do.

    Raises:
        UserError: Ranks share a GPU.
    """
    ranks: dict[str, list[str]] = {}
    for rank, gpu in enumerate(gpus):
        ranks.setdefault(gpu.uuid, []).append(str(rank))
    for uuid, sharing in ranks.items():
        if len(sharing) > 1:
            raise UserError(
                f"ranks {', '.join(sharing)} share the GPU {uuid}, which NCCL refuses: start one "
                f"rank for each GPU, or {fix}"
            )


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
