"""Communication beside computation, also on devices that have no streams."""

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import ParamSpec

import torch
import torch.distributed as dist

P = ParamSpec("P")

_CPU = torch.device("cpu")


class Background:
    """A thread that carries out calls one after another, in the order in which they were started.

    Collectives of one process group need the same order on all ranks: whoever starts them in one
    order on all ranks may do so ahead of their use. gloo and the kernels let other threads run.

    On a GPU the thread has a stream of its own: what it launches begins after what was launched
    before `start`, and what is launched after `wait` begins after it.

    Args:
        name: of the thread, for profiles.
        device: of the tensors.
    """

    def __init__(self, name: str, device: torch.device = _CPU) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # a new thread would take as many cores as there are
        self._threads = ThreadPoolExecutor(
            1, name, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
        )
        self._last: Running | None = None
        self._error: BaseException | None = None
        """that of the first call that had one"""

    def start(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> "Running":
        """Queues a call and returns at once."""
        do = partial(self._noting, partial(call, *args, **kwargs))
        if self._stream is None:
            self._last = Running(self._threads.submit(do))
        else:
            launched = torch.cuda.current_stream(self._stream.device).record_event()
            self._last = Running(self._threads.submit(_launch, self._stream, launched, do))
        return self._last

    def check(self) -> None:
        """Raises the error of a call that has failed already."""
        if self._error is not None:
            raise self._error

    def drain(self) -> None:
        """Returns when every call has ended; raises the error of the first one that has one."""
        if self._last is None:
            return
        last, self._last = self._last, None
        last.settle()
        error, self._error = self._error, None
        if error is not None:
            raise error
        last.wait()

    def _noting(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = self._error or error
            raise


def drain_all(*lanes: Background) -> None:
    """Returns when every call of all lanes has ended; raises one of their errors."""
    with ExitStack() as every:
        for lane in lanes:
            every.callback(lane.drain)


class Running(dist.Work):
    """A call that was started."""

    def __init__(self, future: "Future[torch.cuda.Event | None]") -> None:
        super().__init__()
        self._future = future

    @property
    def went_well(self) -> bool:
        """Whether the call has ended without an error."""
        return self._future.done() and self._future.exception() is None

    def settle(self) -> None:
        """Returns when the call has ended, well or not."""
        futures.wait([self._future])

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the call has ended; raises its error. Collectives have timeouts already."""
        launched = self._future.result()
        if launched is not None:
            torch.cuda.current_stream(launched.device).wait_event(launched)
        return True

    def synchronize(self) -> None:
        """Returns when the device, too, has done what the call launched; raises its error."""
        launched = self._future.result()
        if launched is not None:
            launched.synchronize()


def _launch(
    stream: torch.cuda.Stream, after: torch.cuda.Event, call: Callable[[], None]
) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        call()
        done: torch.cuda.Event = stream.record_event()
        return done


class Lanes:
    """Gathers and reductions, each in an order of its own and so on a process group of its own."""

    def __init__(self) -> None:
        self.gathers = Background("gather")
        self.reductions = Background("reduce")

    def drain(self) -> None:
        """See `Background.drain`."""
        drain_all(self.gathers, self.reductions)
