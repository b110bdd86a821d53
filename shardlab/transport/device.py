"""Where the ranks of a process group compute."""

import torch
import torch.distributed as dist


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The current GPU when the group has NCCL, with whatever else; the CPU otherwise."""
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
