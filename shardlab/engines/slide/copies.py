"""Copies between host memory and the device, and the context of those who start them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import torch
from torch import Tensor

from shardlab.comm.ledger import Ledger
from shardlab.engines.slide.groups import RankGroups
from shardlab.engines.slide.sync import ErrorRelay, RankProgress
from shardlab.transport.background import Background, Running, drain_all

P = ParamSpec("P")


class Copies(ABC):
    """Two lanes, to and from the device, each with a thread and an order of its own.

    What is started in a lane may wait, communicate and `copy`. It begins after what its caller had
    launched on the device before; what is launched after `Running.wait` begins after it, and
    `Running.synchronize` returns when its bytes have arrived.
    """

    def __init__(self, device: torch.device) -> None:
        self._inward = Background("in", device)
        self._outward = Background("out", device)

    def start_in(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Running:
        """Queue a call in the lane to the device."""
        return self._inward.start(call, *args, **kwargs)

    def start_out(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Running:
        """Queue a call in the lane from the device."""
        return self._outward.start(call, *args, **kwargs)

    def drain(self) -> None:
        """Return when all calls have ended; raise one of their errors."""
        drain_all(self._inward, self._outward)

    def pin(self, tensor: Tensor) -> None:  # noqa: B027  (a CPU reaches all memory)
        """Page-lock host memory that will be copied from or to; no page of it twice."""

    def unpin(self) -> None:  # noqa: B027
        """Undo every `pin`, when nothing is copied any more."""

    @abstractmethod
    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy a vector, within a call in a lane."""


class ThrottledCopies(Copies):
    """Copies for a CPU as the device, with a rate and a latency that make overlap visible.

    Args:
        gigabytes_per_s: of each lane; None for as fast as memory is.
        latency_s: of each copy, before its first byte.
    """

    def __init__(self, gigabytes_per_s: float | None = None, latency_s: float = 0.0) -> None:
        super().__init__(torch.device("cpu"))
        self._seconds_per_byte = 0.0 if gigabytes_per_s is None else 1e-9 / gigabytes_per_s
        self._latency_s = latency_s

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        end = time.perf_counter() + self._latency_s + source.nbytes * self._seconds_per_byte
        target.copy_(source)
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)


class CudaCopies(Copies):
    """Copies by the copy engines of a GPU, on a stream for each lane.

    No test has run this on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._device = device
        self._pinned: list[Tensor] = []
        """keep their memory until it is unpinned"""

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        target.copy_(source, non_blocking=True)

    def pin(self, tensor: Tensor) -> None:
        """Page-lock in place: `Tensor.pin_memory` would copy, and allocate a power of two."""
        if not tensor.nbytes:
            return
        with torch.cuda.device(self._device):  # else the current GPU would get a context
            result = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        torch.cuda.check_error(int(result))
        self._pinned.append(tensor)

    def unpin(self) -> None:  # noqa: D102
        with torch.cuda.device(self._device):
            while self._pinned:
                result = torch.cuda.cudart().cudaHostUnregister(self._pinned[-1].data_ptr())
                torch.cuda.check_error(int(result))
                del self._pinned[-1]


@dataclass(frozen=True)
class NodeContext:
    """Objects of one engine that its parts share."""

    groups: RankGroups
    copies: Copies
    progress: RankProgress
    errors: ErrorRelay
    ledger: Ledger

    def start_in(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Running:
        """Queue a call in the lane to the device; others see its error."""
        return self.copies.start_in(self.errors.guard(call), *args, **kwargs)

    def start_out(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> Running:
        """Queue a call in the lane from the device; others see its error."""
        return self.copies.start_out(self.errors.guard(call), *args, **kwargs)


def copies_for(device: torch.device) -> Copies:
    """Return those of a device, unthrottled."""
    return CudaCopies(device) if device.type == "cuda" else ThrottledCopies()
