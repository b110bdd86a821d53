"""A CPU that is taken for a device behind the host; what no wait orders is an error.

Every operator runs at once, in the thread that launches it, so that results are those of the CPU.
`Races` finds whatever a device could have done in another order: operators, collectives and kernels
on all streams, copies to and from page-locked memory, its use by the host, freed memory.

Threads that launch are delayed at random, as their order is not that of streams. A wait of the
library can be removed, by the place that it is called from.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import Variable

from shardlab.activations import anonymous_file
from shardlab.devices.accelerator import Accelerator, Event, Stream
from shardlab.devices.registry import replaced
from shardlab.transport.background import Background
from tests.devices.races import Clock, Races, join
from tests.devices.watch import Watch

_DELAY_S = 1e-3
"""at most, before a call of a thread beside the computation"""
_FUNCTIONS = 2
"""that name a place: who waits is often called by several others"""


class SimulatedEvent(Event):
    def __init__(self, device: "SimulatedDevice", clock: Clock) -> None:
        self._device, self.clock, self._time = device, clock, perf_counter()

    def done(self) -> bool:
        # the latest device: its host finds out no earlier than it has to
        host = self._device.races.host
        return all(count <= host.get(stream, 0) for stream, count in self.clock.items())

    def synchronize(self) -> None:
        if not self._device.is_removed("synchronize"):
            self._join()

    def seconds_until(self, end: Event) -> float:
        assert isinstance(end, SimulatedEvent)
        return end._time - self._time

    def _join(self) -> None:
        with self._device.races.lock:
            join(self._device.races.host, self.clock)


class SimulatedStream(Stream):
    def __init__(self, device: "SimulatedDevice") -> None:
        self._device, self.number = device, next(device.numbers)
        device.races.clocks[self.number] = {}

    def record(self, timed: bool = False) -> Event:
        if not timed and self._device.is_removed("record"):
            return SimulatedEvent(self._device, {})
        with self._device.races.lock:
            clock = {**self._device.races.clocks[self.number]}
            join(clock, self._device.races.host)
        return SimulatedEvent(self._device, clock)

    def wait(self, event: Event) -> None:
        assert isinstance(event, SimulatedEvent)
        if not self._device.is_removed("wait"):
            with self._device.races.lock:
                join(self._device.races.clocks[self.number], event.clock)

    @contextmanager
    def current(self) -> Iterator[None]:
        before = self._device.current
        self._device.local.current = self
        try:
            yield
        finally:
            self._device.local.current = before

    def set_device(self) -> None: ...

    def uses(self, tensor: Tensor) -> None:
        if not self._device.is_removed("uses"):
            block = self._device.races.block(tensor, self.number)
            assert block is not None
            block.users.add(self.number)


class SimulatedFuture(torch.futures.Future[Any]):
    """Future for which the end of the backward pass waits, too, as that of DDP does in C++."""

    def __init__(self, device: "SimulatedDevice") -> None:
        super().__init__()
        self._device = device
        self._clock: Clock = {}

    def set_result(self, result: Any) -> None:
        with self._device.races.lock:
            self._clock = {**self._device.races.clocks[self._device.current.number]}
        super().set_result(result)
        if torch._C._current_graph_task_id() != -1:  # within a backward pass
            Variable._execution_engine.queue_callback(self._join)

    def wait(self) -> Any:
        result = super().wait()
        self._join()
        return result

    def _join(self) -> None:
        with self._device.races.lock:
            join(self._device.races.clocks[self._device.current.number], self._clock)


class SimulatedDevice(Accelerator):
    """A device with any number of streams.

    Args:
        seed: of delays.
        removed: a place of `places`, where nothing waits.
    """

    def __init__(self, seed: int = 0, removed: str = "") -> None:
        self.races = Races()
        self.random = random.Random(seed)
        self.places: dict[str, None] = {}
        """where the library waits, and of what: the call and the function that makes it"""
        self.collectives: list[tuple[str, int]] = []
        """launched beside the computation: names, and numbers of process groups"""
        self._groups: list[str] = []
        self.local = threading.local()
        self.numbers = count()
        self._removed = removed
        self._default = SimulatedStream(self)

    @property
    def current(self) -> SimulatedStream:
        found: SimulatedStream = getattr(self.local, "current", self._default)
        return found

    def stream(self) -> Stream:
        return SimulatedStream(self)

    def current_stream(self) -> Stream:
        return self.current

    def future(self) -> torch.futures.Future[Any]:
        return SimulatedFuture(self)

    def page_locked(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        host = torch.empty(shape, dtype=dtype)
        self.races.page_lock(host, allocated=True)
        return host

    def page_lock(self, tensor: Tensor) -> None:
        self.races.page_lock(tensor)

    def page_unlock(self, tensor: Tensor) -> None:
        self.races.touch("page_unlock", (), [tensor])
        self.races.page_unlock(tensor)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def is_removed(self, call: str) -> bool:
        """Note that the library calls this; return whether it is to do nothing."""
        place = _place(call)
        if place is not None:
            self.places[place] = None
        return place is not None and place == self._removed

    def number_of(self, group: str) -> int:
        """Return which of the groups that were used this is, by their first use."""
        if group not in self._groups:
            self._groups.append(group)
        return self._groups.index(group)

    def delay(self) -> None:
        time.sleep(self.random.random() * _DELAY_S)

    def synchronize(self) -> None:
        """Let the host wait for the current stream."""
        with self.races.lock:
            join(self.races.host, self.races.clocks[self.current.number])


def _place(call: str) -> str | None:
    """Return which functions of the library have made the call; None in a thread beside them."""
    frame: FrameType | None = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < _FUNCTIONS:
        path = frame.f_code.co_filename.rpartition("/shardlab/")[2]
        inside = "/shardlab/" in frame.f_code.co_filename
        if inside and not path.startswith(("devices/", "transport/background")):
            names.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return f"{call}: {' < '.join(names)}" if names else None


@contextmanager
def simulated(seed: int = 0, removed: str = "") -> Iterator[SimulatedDevice]:
    """Take CPU tensors for those of a device while the block runs.

    Raises:
        AssertionError: there were races.
    """
    device = SimulatedDevice(seed, removed)
    races = device.races
    run, tolist, transfer = Background._run, Tensor.tolist, anonymous_file._transfer

    def run_watched(self: Background, call: Callable[[], None]) -> None:
        device.delay()
        with Watch(device, on_host=self._accelerator is None):
            run(self, call)

    def read(tensor: Tensor) -> Any:
        if races.is_page_locked(tensor):
            races.touch("tolist", [tensor], ())
        else:
            races.launch(device.current.number, "tolist", [tensor], ())
            device.synchronize()
        return tolist(tensor)

    def read_or_write(call: Any, file: int, data: Tensor, start: int) -> None:
        outward = call is os.pwrite
        races.touch("a file", [data] if outward else (), () if outward else [data])
        transfer(call, file, data, start)

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        races.resize(storage, size, device.current.number)
        return storage

    with (
        replaced("cpu", device),
        patch.object(Background, "_run", run_watched),
        patch.object(Tensor, "tolist", read),
        patch.object(anonymous_file, "_transfer", read_or_write),
        patch.object(torch.UntypedStorage, "resize_", resized),
        Watch(device),
    ):
        yield device
    if not removed:
        assert not races.found, "\n".join(races.found)
