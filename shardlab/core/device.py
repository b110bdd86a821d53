"""Device for computation: streams, page-locked memory and deterministic algorithms of a GPU.

Streams and events are torch's (torch.cuda.Stream, torch.cuda.Event). Experimental: this code has
not run on a GPU.
"""

import os
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

Timestamp = float | torch.cuda.Event
"""Seconds of the host's clock; on a GPU, a timed event of a stream."""


def accelerator_of(device: torch.device) -> "Accelerator | None":
    """Return the interface of a GPU, or None for the CPU."""
    return Accelerator(device) if device.type == "cuda" else None


class Accelerator:
    """Interface of a GPU, which works asynchronously.

    Args:
        device: A device without an index is the current GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream on which this thread launches work."""
        return torch.cuda.current_stream(self._device)

    def future(self) -> torch.futures.Future[Any]:
        """Return a future; the streams of its callbacks wait for its result."""
        return torch.futures.Future(devices=[self._device])

    def page_lock(self, tensor: Tensor) -> None:
        """Page-lock host memory in place: `Tensor.pin_memory` would copy it."""
        with torch.cuda.device(self._device):  # else the current GPU would get a context
            result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        torch.cuda.check_error(int(result))

    def page_unlock(self, tensor: Tensor) -> None:
        """Undo `page_lock`; all copies must have ended."""
        with torch.cuda.device(self._device):
            result = torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        torch.cuda.check_error(int(result))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy between the GPU and page-locked memory on the current stream."""
        target.copy_(source, non_blocking=True)


def now(device: torch.device) -> Timestamp:
    """Return the time; on a GPU, an event after the work launched on the current stream so far."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Timestamp, end: Timestamp) -> float:
    """Return the seconds between two timestamps of one device, both in the past."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float), "of one device"
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; to a GPU it is copied asynchronously.

    An asynchronous copy needs page-locked memory, which PyTorch frees when the copy is done
    (aten/src/ATen/core/CachingHostAllocator.h).
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        # always a copy: `pin_memory` returns a page-locked tensor itself, which may be overwritten
        locked = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return locked.to(device, non_blocking=True)
    return tensor.to(device)


def compute_deterministically() -> None:
    """Make this process use only deterministic algorithms.

    Call it before the first product on a GPU, when cuBLAS reads its workspace setting (cuBLAS
    documentation, "Results reproducibility"). An operator without a deterministic algorithm then
    raises RuntimeError (torch.use_deterministic_algorithms).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # filling each new buffer takes time, and only helps to find reads of uninitialized memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def allows_tf32() -> bool:
    """Return whether products of float32 may round their factors to TF32; off by default."""
    return torch.get_float32_matmul_precision() != "highest"
