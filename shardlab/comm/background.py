"""Communication beside computation, also on devices that have no streams."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._running: list[Running] = []

    def start(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> "Running":
        """Queues a call and returns at once."""
        if self._stream is None:
            running = Running(self._threads.submit(call, *args, **kwargs))
        else:
            launched = torch.cuda.current_stream().record_event()
            before = partial(call, *args, **kwargs)
            running = Running(self._threads.submit(_launch, self._stream, launched, before))
        self._running = [*(each for each in self._running if not each.went_well), running]
        return running

    def check(self) -> None:
        """Raises the error of a call that has failed already."""
        for each in self._running:
            if each.failed:
                each.wait()

    def drain(self) -> None:
        """Returns when every call has ended; raises the error of the first one that has one."""
        running, self._running = self._running, []
        for each in running:
            each.wait()


class Running(dist.Work):
    """A call that was started."""

    def __init__(self, future: "Future[torch.cuda.Event | None]") -> None:
        super().__init__()
        self._future = future

    @property
    def went_well(self) -> bool:
        """Whether the call has ended without an error."""
        return self._future.done() and self._future.exception() is None

    @property
    def failed(self) -> bool:
        """Whether the call has ended with an error."""
        return self._future.done() and self._future.exception() is not None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the call has ended; raises its error. Collectives have timeouts already."""
        launched = self._future.result()
        if launched is not None:
            torch.cuda.current_stream().wait_event(launched)
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
        return stream.record_event()


class Lanes:
    """Gathers and reductions, each in an order of its own and so on a process group of its own."""

    def __init__(self) -> None:
        self.gathers = Background("gather")
        self.reductions = Background("reduce")

    def drain(self) -> None:
        """See `Background.drain`."""
        self.gathers.drain()
        self.reductions.drain()
