"""Worker processes that end with their parent, however it ends."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from shardlab.core.errors import UserError
from shardlab.core.process import begin_child


def usable_cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


@contextmanager
def worker_pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Start workers by spawn: a fork would copy the locks of the tokenizer's threads.

    To be entered in the main thread: the kernel, which kills the workers of a killed parent,
    watches the thread that starts them.

    Raises:
        UserError: a worker was killed, by the kernel for want of memory or by anyone.
    """
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most likely because memory ran out; free some, or lower "
            "the number of CPUs (taskset), and run this stage again: it keeps finished shards"
        ) from None
    except BaseException:
        # the pool itself would wait for what they are doing
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    begin_child(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
