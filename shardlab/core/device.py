"""The accelerator of a device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardlab.core.accelerator import Accelerator
from shardlab.core.cuda import CudaAccelerator


def accelerator_of(device: torch.device) -> Accelerator | None:
    """Return the interface of a GPU; None for the CPU, whose work the host does itself."""
    if device.type in _replaced:
        return _replaced[device.type]
    return CudaAccelerator(device) if device.type == "cuda" else None


_replaced: dict[str, Accelerator] = {}


@contextmanager
def replaced(device_type: str, accelerator: Accelerator) -> Iterator[None]:
    """Use another accelerator for devices of a type while the block runs: a simulation."""
    _replaced[device_type] = accelerator
    try:
        yield
    finally:
        del _replaced[device_type]
