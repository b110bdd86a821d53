"""Worker processes that end with their parent, however it ends."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from shardlab.core.process import die_with_parent

A = TypeVar("A")
B = TypeVar("B")


def usable_cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start workers by spawn (a fork would copy the locks of the tokenizer's threads).

    They are killed at once when the block is left by an error, and by the kernel when the parent
    is killed. To be entered in the main thread: the kernel watches the thread that starts them.
    """
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    die_with_parent(parent)
    # Ctrl-C reaches the parent as well, which then ends its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
