"""Timing of the communication operations of one rank, and the throttle of an emulated link."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from threading import Lock
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import record_function

from shardlab.comm.background import Background
from shardlab.comm.device_steps import DeviceSteps, Read
from shardlab.core.accelerator import Accelerator, Event
from shardlab.core.device import accelerator_of
from shardlab.profiling.labels import LINK

_Future = torch.futures.Future[object]


class LinkThrottle:
    """Emulated link of one rank: delays the end of its operations as the link would.

    An operation that is issued at t and moves b bytes ends no earlier than
    max(t, when the link is free) + 8 b / rate + delay; the link is free again `delay` before that.
    Both directions of the link are alike, so b is the larger one of bytes sent and received.

    Args:
        bits_per_second: None where network namespaces limit the rate.
    """

    def __init__(self, delay_ms: float, bits_per_second: int | None = None) -> None:
        self._delay_s = delay_ms / 1e3
        self._bits_per_second = bits_per_second
        self._free = 0.0
        # the main thread and `Background` threads share the link
        self._lock = Lock()

    def carry(self, nbytes: float) -> float:
        """Reserve the link for an operation issued now; return when its last byte is sent.

        Times are those of `time.perf_counter`.
        """
        seconds = 8 * nbytes / self._bits_per_second if self._bits_per_second else 0.0
        with self._lock:
            self._free = max(time.perf_counter(), self._free) + seconds
            return self._free

    def end(self, carried: float) -> None:
        """Sleep until the end of an operation whose last byte is sent at `carried`."""
        left = carried + self._delay_s - time.perf_counter()
        if left > 0:
            with record_function(LINK):
                time.sleep(left)


class _Operation(NamedTuple):
    """Operation that was issued."""

    carried: float
    """when an emulated link has carried its bytes"""
    accelerator: Accelerator | None
    begin: Event | None


class Traffic:
    """Timer of the operations of all collectives that share one ledger, from issue to end.

    The bytes of an operation are those that this rank sends to others, or those that it receives if
    these are more. Operations without bytes are ignored. An operation on a device lasts from when
    the stream that issues it has come to it until the stream that waits for it goes on.
    """

    def __init__(self) -> None:
        self.throttle: LinkThrottle | None = None
        """emulates a link: operations end later"""
        # operations end in the threads of the backend, too
        self._lock = Lock()
        self._under_way = 0
        self._since = self._before = self._at_begin = 0.0
        self._on_device: Accelerator | None = None
        self._steps = DeviceSteps()

    @property
    def seconds(self) -> float:
        """Wall time so far with at least one operation on host memory under way."""
        with self._lock:
            return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)

    def begin_step(self, device: torch.device) -> None:
        """Begin a step of which the time in operations is asked for."""
        self._on_device = accelerator_of(device)
        if self._on_device is not None:
            self._steps.begin(self._on_device)
        self._at_begin = self.seconds

    def end_step(self, read: Read) -> None:
        """End the step; what was launched by then belongs to it.

        Args:
            read: called with the seconds with at least one operation under way: now, or on a device
                by the end of a later step or by `settle`, when the device has done the operations.
        """
        on_host = self.seconds - self._at_begin
        if self._on_device is None:
            read(on_host)
        else:
            self._steps.end(lambda seconds: read(on_host + seconds))

    def settle(self) -> None:
        """Read the times of all steps; the host waits for the device."""
        self._steps.settle()

    @contextmanager
    def operation(self, nbytes: float, device: torch.device) -> Iterator[None]:
        """Time a blocking operation; at the end of the block this thread waits for the link.

        Args:
            device: of the bytes, here and below.
        """
        if nbytes == 0:
            yield
            return
        operation = self._begin(nbytes, device)
        try:
            yield
            # the delay of the link begins when the last rank has sent its bytes
            self._wait(max(operation.carried, time.perf_counter()))
        finally:
            # an operation that failed has ended, too
            self._end(operation)

    def awaited(
        self, start: Callable[[], dist.Work], nbytes: float, device: torch.device
    ) -> dist.Work:
        """Start an operation that ends in `wait()`.

        `wait()` does not wait for an emulated link that has carried the bytes by then.
        """
        if nbytes == 0:
            return start()
        operation = self._begin(nbytes, device)
        return _Awaited(self, start(), operation)

    def ending(
        self, start: Callable[[], dist.Work], nbytes: float, device: torch.device
    ) -> _Future:
        """Start an operation that ends by itself, concurrently with computation; return its future.

        The value of the future is that of `Work.get_future()`.
        """
        if nbytes == 0:
            return start().get_future()
        operation = self._begin(nbytes, device)
        done: _Future = start().get_future()
        if self.throttle is None:
            # torch runs it, on a GPU, with a stream that waits for the operation alone
            return done.then(partial(self._ended, operation))
        later: _Future = torch.futures.Future()

        def arrived(done: _Future) -> None:
            late = max(operation.carried, time.perf_counter())
            self._waiting.start(self._end_late, operation, done, later, late)

        done.add_done_callback(arrived)
        return later

    @cached_property
    def _waiting(self) -> Background:
        """Thread that waits for the link: gloo's own threads are needed for other operations."""
        return Background("link")

    def _end_late(
        self, operation: _Operation, done: _Future, later: _Future, carried: float
    ) -> None:
        self._wait(carried)
        try:
            later.set_result(self._ended(operation, done))
        except RuntimeError as error:
            later.set_exception(error)

    def _ended(self, operation: _Operation, done: _Future) -> object:
        self._end(operation)
        return done.value()

    def _begin(self, nbytes: float, device: torch.device) -> _Operation:
        """Note the start of an operation."""
        begin = None
        if (accelerator := accelerator_of(device)) is not None:
            begin = self._steps.operation_begins(accelerator)
        else:
            with self._lock:
                if self._under_way == 0:
                    self._since = time.perf_counter()
                self._under_way += 1
        carried = 0.0 if self.throttle is None else self.throttle.carry(nbytes)
        return _Operation(carried, accelerator, begin)

    def _wait(self, carried: float) -> None:
        if self.throttle is not None:
            self.throttle.end(carried)

    def _end(self, operation: _Operation) -> None:
        if operation.accelerator is not None:
            if operation.begin is not None:
                self._steps.operation_ends(operation.begin, operation.accelerator)
            return
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._before += time.perf_counter() - self._since


class _Awaited(dist.Work):
    def __init__(self, traffic: Traffic, work: dist.Work, operation: _Operation) -> None:
        super().__init__()
        self._traffic = traffic
        self._work = work
        self._operation = operation

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the operation, up to the timeout of its process group."""
        try:
            self._work.wait()
            self._traffic._wait(self._operation.carried)
        finally:
            # an operation that failed has ended, too
            self._traffic._end(self._operation)
        return True
