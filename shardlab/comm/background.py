"""Calls concurrent with computation, on CPUs as on GPUs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import ParamSpec

import torch
import torch.distributed as dist

from shardlab.core.device import accelerator_of

P = ParamSpec("P")


class Background:
    """Thread that runs calls one after another, in the order in which they were started.

    Collectives of one process group need the same order on all ranks, which one thread keeps. gloo
    and the kernels release the GIL.

    On a GPU the thread has a separate stream: its work begins after all work that was launched
    before `start`, and work that is launched after `wait` begins after it.

    Args:
        name: of the thread, in profiles.
        device: of the tensors; None: the calls work in host memory alone.
        beside: on a GPU, another one of the same device, whose thread launches these calls, too:
            collectives of several NCCL communicators need one order of launches on all ranks. The
            streams are two all the same.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | None = None,
        beside: "Background | None" = None,
    ) -> None:
        accelerator = None if device is None else accelerator_of(device)
        self._stream = None if accelerator is None else accelerator.stream()
        self._threads = ThreadPoolExecutor(
            1, name, initializer=_begin_thread, initargs=(torch.get_num_threads(), self._stream)
        )
        if beside is not None and self._stream is not None:
            self._threads = beside._threads  # noqa: SLF001 - another of this class
        self._last: Running | None = None
        self._error: BaseException | None = None
        """of the first call that failed"""

    def start(self, call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> "Running":
        """Queue a call."""
        do = partial(self._run, partial(call, *args, **kwargs))
        if self._stream is None:
            self._last = Running(self._threads.submit(do))
        else:
            # the call reads what the starter's stream still computes
            launched = torch.cuda.current_stream(self._stream.device).record_event()
            self._last = Running(self._threads.submit(_launch, self._stream, launched, do))
        return self._last

    def check(self) -> None:
        """Raise the error of a call that has failed already."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the device, too, has completed all calls; raise the first one's error."""
        if self._last is None:
            return
        last, self._last = self._last, None
        try:
            last.wait_for_device()  # calls run in order, so all have ended with the last one
        except BaseException as error:
            self._error = self._error or error
        first, self._error = self._error, None
        if first is not None:
            raise first

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = self._error or error
            raise


def wait_all(*lanes: Background) -> None:
    """Wait until every call of all lanes has ended; raise one of their errors."""
    # a stack, so that all lanes have ended if one raises
    with ExitStack() as every:
        for lane in lanes:
            every.callback(lane.wait)


class Running(dist.Work):
    """Call that was started."""

    def __init__(self, future: "Future[torch.cuda.Event | None]") -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the call has ended; raise its error. Collectives have their own timeouts."""
        launched = self._future.result()
        if launched is not None:
            # the caller's stream waits, not its thread
            torch.cuda.current_stream(launched.device).wait_event(launched)
        return True

    def wait_for_device(self) -> None:
        """Wait on the host until the device, too, has completed the call; raise its error."""
        launched = self._future.result()
        if launched is not None:
            launched.synchronize()


def _begin_thread(threads: int, stream: torch.cuda.Stream | None) -> None:
    # the number of threads is per thread: a new one would use all cores
    torch.set_num_threads(threads)
    if stream is not None:
        # so is the device: each rank would allocate a context on the first GPU
        torch.cuda.set_device(stream.device)


def _launch(
    stream: torch.cuda.Stream, after: torch.cuda.Event, call: Callable[[], None]
) -> torch.cuda.Event:
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        call()
        done: torch.cuda.Event = stream.record_event()
    return done


class Lanes:
    """Threads of gathers and of reductions, which need separate process groups."""

    def __init__(self) -> None:
        self.gathers = Background("gather")
        self.reductions = Background("reduce")

    def wait(self) -> None:
        """See `Background.wait`."""
        wait_all(self.gathers, self.reductions)
