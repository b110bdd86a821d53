"""A CPU that is taken for a device behind the host: its events come when a test says so."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

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


class LateDevice(Accelerator):
    """What is launched is computed at once; the host learns it when `is_idle`, or waits for it."""

    def __init__(self) -> None:
        self.is_idle = False
        self.copies = 0
        """to the host"""
        self.waits = 0
        """of the host for an event that had not come"""

    def stream(self) -> Stream:
        return LateStream(self)

    def current_stream(self) -> Stream:
        return LateStream(self)

    def to_host(self, values: Tensor) -> Tensor:
        self.copies += 1
        return values.clone()


@contextmanager
def late_cpu() -> Iterator[LateDevice]:
    """Take CPU tensors for those of such a device while the block runs."""
    device = LateDevice()
    with replaced("cpu", device):
        yield device
