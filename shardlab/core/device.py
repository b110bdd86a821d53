"""The device that computes: streams, page-locked memory and deterministic algorithms of a GPU.

Streams and events are torch's own (torch.cuda.Stream, torch.cuda.Event). Experimental: no GPU has
run this code.
"""

import os
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

Moment = float | torch.cuda.Event
"""seconds of the host's clock; on a GPU a timed event of a stream"""


def accelerator_of(device: torch.device) -> "Accelerator | None":
    """Return the interface of a GPU; None for the CPU, which works while the host waits."""
    return Accelerator(device) if device.type == "cuda" else None


class Accelerator:
    """A GPU, which works while the host goes on.

    Args:
        device: with or without an index; without one it is the current GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self) -> torch.cuda.Stream:
        """Return a new stream."""
        return torch.cuda.Stream(self._device)

    def current_stream(self) -> torch.cuda.Stream:
        """Return the stream on which this thread launches."""
        return torch.cuda.current_stream(self._device)

    def future(self) -> torch.futures.Future[Any]:
        """Return a future for whose result the streams of its callbacks wait, too."""
        return torch.futures.Future(devices=[self._device])

    def page_lock(self, tensor: Tensor) -> None:
        """Page-lock host memory in place: `Tensor.pin_memory` would copy it."""
        with torch.cuda.device(self._device):  # else the current GPU would get a context
            result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        torch.cuda.check_error(int(result))

    def page_unlock(self, tensor: Tensor) -> None:
        """Undo `page_lock`, when nothing is copied any more."""
        with torch.cuda.device(self._device):
            result = torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        torch.cuda.check_error(int(result))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Launch a copy between the GPU and page-locked memory on the current stream."""
        target.copy_(source, non_blocking=True)


def now(device: torch.device) -> Moment:
    """Return the time; on a GPU the event after all work of the current stream so far."""
    if device.type != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return the time from one moment to another of the same device, which has passed both."""
    if isinstance(begin, float) or isinstance(end, float):
        assert isinstance(begin, float) and isinstance(end, float), "of one device"
        return end - begin
    return float(begin.elapsed_time(end)) / 1e3


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device; a GPU copies it while the host goes on.

    It does so from page-locked memory alone. PyTorch frees that when the copy is done
    (aten/src/ATen/core/CachingHostAllocator.h).
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        # not `pin_memory`, which returns what is page-locked already: the caller may write to it
        locked = torch.empty_like(tensor, pin_memory=True).copy_(tensor)
        return locked.to(device, non_blocking=True)
    return tensor.to(device)


def compute_deterministically() -> None:
    """Let this process use deterministic algorithms alone, from now on.

    To be called before the first product on a GPU: cuBLAS reads its workspace setting then (cuBLAS
    documentation, "Results reproducibility"). torch raises RuntimeError, which names the operator,
    where it has no such algorithm (torch.use_deterministic_algorithms).
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # a pass over each new buffer, which only shows reads of what nothing was written to
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def allows_tf32() -> bool:
    """Return whether products of float32 may round their factors to TF32; off by default."""
    return torch.get_float32_matmul_precision() != "highest"
