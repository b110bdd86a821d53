"""Timing of the communication operations of one rank, and the throttle of an emulated link."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from threading import Lock

import torch
import torch.distributed as dist
from torch.profiler import record_function

from shardlab.profiling.traces.labels import LINK
from shardlab.transport.background import Background

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


class Traffic:
    """Timer of the operations of all collectives that share one ledger, from issue to end.

    The bytes of an operation are those that this rank sends to others, or those that it receives if
    these are more. Operations without bytes are ignored.
    """

    def __init__(self) -> None:
        self.throttle: LinkThrottle | None = None
        """emulates a link: operations end later"""
        # operations end in the threads of the backend, too
        self._lock = Lock()
        self._under_way = 0
        self._since = self._before = 0.0

    @property
    def seconds(self) -> float:
        """Wall time so far with at least one operation under way.

        On GPUs it covers issuing operations, not carrying them out.
        """
        with self._lock:
            return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)

    @contextmanager
    def operation(self, nbytes: float) -> Iterator[None]:
        """Time a blocking operation; at the end of the block this thread waits for the link."""
        if nbytes == 0:
            yield
            return
        carried = self._begin(nbytes)
        try:
            yield
            # the delay of the link begins when the last rank has sent its bytes
            self._wait(max(carried, time.perf_counter()))
        finally:
            # an operation that failed has ended, too
            self._end()

    def awaited(self, start: Callable[[], dist.Work], nbytes: float) -> dist.Work:
        """Start an operation that ends in `wait()`.

        `wait()` does not wait for an emulated link that has carried the bytes by then.
        """
        if nbytes == 0:
            return start()
        carried = self._begin(nbytes)
        return _Awaited(self, start(), carried)

    def ending(self, start: Callable[[], dist.Work], nbytes: float) -> _Future:
        """Start an operation that ends by itself, concurrently with computation; return its future.

        The value of the future is that of `Work.get_future()`.
        """
        if nbytes == 0:
            return start().get_future()
        carried = self._begin(nbytes)
        done: _Future = start().get_future()
        if self.throttle is None:
            return done.then(self._ended)
        later: _Future = torch.futures.Future()

        def arrived(done: _Future) -> None:
            self._waiting.start(self._end_late, done, later, max(carried, time.perf_counter()))

        done.add_done_callback(arrived)
        return later

    @cached_property
    def _waiting(self) -> Background:
        """Thread that waits for the link: gloo's own threads are needed for other operations."""
        return Background("link")

    def _end_late(self, done: _Future, later: _Future, carried: float) -> None:
        self._wait(carried)
        try:
            later.set_result(self._ended(done))
        except RuntimeError as error:
            later.set_exception(error)

    def _ended(self, done: _Future) -> object:
        self._end()
        return done.value()

    def _begin(self, nbytes: float) -> float:
        """Note the start of an operation; return when an emulated link has carried its bytes."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
        return 0.0 if self.throttle is None else self.throttle.carry(nbytes)

    def _wait(self, carried: float) -> None:
        if self.throttle is not None:
            self.throttle.end(carried)

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._before += time.perf_counter() - self._since


class _Awaited(dist.Work):
    def __init__(self, traffic: Traffic, work: dist.Work, carried: float) -> None:
        super().__init__()
        self._traffic = traffic
        self._work = work
        self._carried = carried

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end of the operation, up to the timeout of its process group."""
        try:
            self._work.wait()
            self._traffic._wait(self._carried)
        finally:
            # an operation that failed has ended, too
            self._traffic._end()
        return True
