"""A CPU that is taken for a device behind the host: its events come when a test says so."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from shardlab.devices.accelerator import Accelerator, Event, Stream
from shardlab.devices.registry import replaced


class LateEvent(Event):
    def __init__(self, device: "LateDevice") -> None:
        self._device, self._time = device, perf_counter()

    def done(self) -> bool:
        return self._device.is_idle

    def synchronize(self) -> None:
        self._device.waits += not self._device.is_idle

    def seconds_until(self, end: Event) -> float:
        assert isinstance(end, LateEvent)
        return end._time - self._time


class LateStream(Stream):
    def __init__(self, device: "LateDevice") -> None:
        self._device = device

    def record(self, timed: bool = False) -> Event:
        return LateEvent(self._device)

    def wait(self, event: Event) -> None: ...

    @contextmanager
    def current(self) -> Iterator[None]:
        yield

    def set_device(self) -> None: ...

    def uses(self, tensor: Tensor) -> None: ...


class LateDevice(Accelerator):
    """Computes at once; the host learns it when `is_idle`, or waits for it."""

    def __init__(self) -> None:
        self.is_idle = False
        self.copies = 0
        """between the device and the host"""
        self.waits = 0
        """of the host for an event that had not come"""

    def stream(self) -> Stream:
        return LateStream(self)

    def current_stream(self) -> Stream:
        return LateStream(self)

    def future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()

    def page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def page_lock(self, tensor: Tensor) -> None: ...

    def page_unlock(self, tensor: Tensor) -> None: ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        self.copies += 1
        target.copy_(source)


@contextmanager
def late_cpu() -> Iterator[LateDevice]:
    """Take CPU tensors for those of such a device while the block runs."""
    device = LateDevice()
    with replaced("cpu", device):
        yield device
