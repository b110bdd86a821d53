"""Worker processes that end with their parent, however it ends."""

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from types import ModuleType
from typing import Any, TypeVar

from shardlab.core.errors import UserError
from shardlab.core.process import die_with_parent

A = TypeVar("A")
B = TypeVar("B")


def usable_cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class WorkerKilled(UserError):
    """A worker process that was killed."""


class _Process(SpawnProcess):
    """A process that does not import the main module of its parent: with that of training it would
    import torch, which takes seconds of every worker, and none needs it."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:  # noqa: N802 - a private method of multiprocessing
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return SpawnProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start workers by spawn (a fork would copy the locks of the tokenizer's threads).

    They are killed at once when the block is left by an error, and by the kernel when the parent
    is killed. To be entered in the main thread: the kernel watches the thread that starts them.

    Raises:
        WorkerKilled: a worker was killed, by the kernel for want of memory or by anyone.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes,
        mp_context=_Context(),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    except BrokenProcessPool:
        raise WorkerKilled(
            "a worker process was killed, most likely because memory ran out; free some, or lower "
            "the number of CPUs (taskset), and run this stage again: it keeps finished shards"
        ) from None
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    die_with_parent(parent)
    # Ctrl-C and the end of a terminal reach the parent as well, which then ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each


def map_in_order(
    pool: ProcessPoolExecutor, function: Callable[[A], B], items: Iterable[A], window: int
) -> Iterator[B]:
    """Map `function` over items in order, with at most `window` items in flight."""
    pending: deque[Future[B]] = deque()
    for item in items:
        pending.append(pool.submit(function, item))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
