"""Worker processes that end with their parent, also if the parent is killed."""

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
    """Start worker processes by spawn, since a fork would copy locks of the tokenizer's threads.

    Call it in the main thread: the kernel kills the workers when the thread that started them ends.

    Raises:
        UserError: A worker was killed, for example because memory ran out.
    """
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start_worker, (os.getpid(),))
    try:
        yield pool
    except BrokenProcessPool:
        raise UserError(
            "a worker process was killed, most likely because memory ran out; free some, or lower "
            "the number of CPUs (taskset), and run this stage again: it keeps finished shards"
        ) from None
    except BaseException:
        # to shut the pool down would wait for the running tasks
        for process in set(multiprocessing.active_children()) - before:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(parent: int) -> None:
    begin_child(parent)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
