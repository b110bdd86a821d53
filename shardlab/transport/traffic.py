"""The operations of one rank on the wire: how long any lasts, and how long a link makes it last."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from threading import Lock

import torch
import torch.distributed as dist

from shardlab.transport.background import Background
from shardlab.transport.link_throttle import LinkThrottle

_Future = torch.futures.Future[object]


class Traffic:
    """Every operation of the collectives that one ledger counts passes here, from issue to end.

    Bytes of an operation are those that this rank sends to others, or those that it takes from them
    if these are more; without any it is none.
    """

    def __init__(self) -> None:
        self.pace: LinkThrottle | None = None
        """emulates a link: operations end later"""
        self._lock = Lock()
        self._under_way = 0
        self._since = self._before = 0.0

    @property
    def seconds(self) -> float:
        """Wall time so far with one operation or more under way.

        Devices carry out their operations later than the CPU asks for them: of those this says
        nothing.
        """
        with self._lock:
            return self._before + (time.perf_counter() - self._since if self._under_way else 0.0)

    @contextmanager
    def operation(self, nbytes: float) -> Iterator[None]:
        """Around one that ends with the block; at its end this thread waits for the link."""
        if nbytes == 0:
            yield
            return
        carried = self._begin(nbytes)
        try:
            yield
            self._wait(max(carried, time.perf_counter()))
        finally:
            self._end()

    def awaited(self, start: Callable[[], dist.Work], nbytes: float) -> dist.Work:
        """Starts one that ends when somebody waits for it.

        A link that has carried it by then makes nobody wait longer.
        """
        if nbytes == 0:
            return start()
        carried = self._begin(nbytes)
        return _Awaited(self, start(), carried)

    def ending(self, start: Callable[[], dist.Work], nbytes: float) -> _Future:
        """Starts one that ends by itself, beside computation; the future of its end."""
        if nbytes == 0:
            return start().get_future()
        carried = self._begin(nbytes)
        done: _Future = start().get_future()
        if self.pace is None:
            return done.then(self._ended)
        later: _Future = torch.futures.Future()

        def arrived(done: _Future) -> None:
            self._waiting.start(self._end_late, done, later, max(carried, time.perf_counter()))

        done.add_done_callback(arrived)
        return later

    @cached_property
    def _waiting(self) -> Background:
        """Waits for the link in the place of gloo's threads, which others need."""
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
        """Returns when an emulated link has carried the bytes."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1
        return 0.0 if self.pace is None else self.pace.carry(nbytes)

    def _wait(self, carried: float) -> None:
        if self.pace is not None:
            self.pace.end(carried)

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
        """Returns when the operation has ended; its group's own timeout holds."""
        try:
            self._work.wait()
            self._traffic._wait(self._carried)
        finally:
            self._traffic._end()
        return True
