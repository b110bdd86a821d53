"""Copies between host memory and the device, and the context of those who start them."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running, drain_all
from shardlab.comm.ledger import Ledger
from shardlab.config.strategy import CanonicalStrategy
from shardlab.core.device import Accelerator, accelerator_of
from shardlab.engines.slide.error_relay import ErrorRelay
from shardlab.engines.slide.groups import RankGroups
from shardlab.engines.slide.rank_progress import RankProgress

P = ParamSpec("P")


class Copies(ABC):
    """Two lanes, to and from the device, each with a thread and an order of its own.

    What is started in a lane may wait, communicate and `copy`. It begins after what its caller had
    launched on the device before; what is launched after `Running.wait` begins after it, and
    `Running.synchronize` returns when its bytes have arrived.

    Args:
        one_thread: launches the calls of both lanes on a GPU, in the order in which they were
            started: for lanes that both communicate between devices.
    """

    def __init__(self, device: torch.device, one_thread: bool = False) -> None:
        self._inward = Background("in", device)
        self._outward = Background("out", device, beside=self._inward if one_thread else None)

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


class AcceleratorCopies(Copies):
    """Copies by the copy engines of a GPU, on a stream for each lane."""

    def __init__(self, device: torch.device, accelerator: Accelerator, one_thread: bool) -> None:
        super().__init__(device, one_thread)
        self._accelerator = accelerator
        self._pinned: list[Tensor] = []
        """keep their memory until it is unpinned"""

    def copy(self, target: Tensor, source: Tensor) -> None:  # noqa: D102
        self._accelerator.copy(target, source)

    def pin(self, tensor: Tensor) -> None:  # noqa: D102
        if tensor.nbytes:
            self._accelerator.page_lock(tensor)
            self._pinned.append(tensor)

    def unpin(self) -> None:  # noqa: D102
        while self._pinned:
            self._accelerator.page_unlock(self._pinned[-1])
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


def copies_for(device: torch.device, strategy: CanonicalStrategy) -> Copies:
    """Return those of a device, unthrottled."""
    if (accelerator := accelerator_of(device)) is None:
        return ThrottledCopies()
    # NCCL may hang where ranks launch on two communicators in two orders
    both = strategy.param_transfer == "shard" and strategy.grad_sync == "gpu_reduce"
    return AcceleratorCopies(device, accelerator, one_thread=both)
