"""Inputs of a step on the device that computes."""

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a GPU copies it while the host goes on.

    It does so from page-locked memory alone. PyTorch frees that when the copy is done
    (aten/src/ATen/core/CachingHostAllocator.h).
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
