import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shardlab.codecs.kernels.adam import Hyper, adam_
from shardlab.codecs.kernels.workers import Workers
from tests.codecs.kernels.adam_cases import Case, stepped
from tests.codecs.kernels.kernel_vectors import needs_compiled

CASE = Case(n=100_003)


def threads():
    """Return the affinity of each worker thread of this process."""
    tasks = Path("/proc/self/task").iterdir()
    workers = [task.name for task in tasks if (task / "comm").read_text() == "shardlab-worker\n"]
    return [sorted(os.sched_getaffinity(int(number))) for number in workers]


@needs_compiled
def test_threads_are_pinned_and_end_with_the_pool():
    before, cpu = threads(), max(os.sched_getaffinity(0))
    workers = Workers(3, [cpu])
    assert threads() == before
    stepped(CASE, workers)
    assert sorted(threads()) == sorted([*before, *[[cpu]] * 3])
    workers.close()
    assert sorted(threads()) == sorted(before)
    stepped(CASE, workers)
    assert len(threads()) == len(before) + 3


@needs_compiled
def test_unpinned_threads_inherit_the_affinity_of_the_caller():
    before, own = threads(), sorted(os.sched_getaffinity(0))
    workers = Workers(2)
    stepped(CASE, workers)
    assert sorted(threads()) == sorted([*before, own, own])
    workers.close()


def test_pool_serves_concurrent_callers():
    expected, workers = stepped(CASE), Workers(2)
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(lambda _: stepped(CASE, workers) == expected, range(20)))


def test_forked_process_starts_its_own_threads():
    expected, workers = stepped(CASE), Workers(2)
    stepped(CASE, workers)
    # forked while a caller uses the pool
    stop = threading.Event()

    def run_steps():
        while not stop.is_set():
            stepped(CASE, workers)

    caller = threading.Thread(target=run_steps)
    caller.start()
    children = []
    for _ in range(5):
        children.append(os.fork())
        if not children[-1]:
            same = stepped(CASE, workers) == expected
            workers.close()
            os._exit(0 if same else 1)
    stop.set()
    caller.join()
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5
    assert stepped(CASE, workers) == expected


@needs_compiled
@pytest.mark.parametrize("workers", [None, Workers(1)])
def test_kernel_releases_the_interpreter_lock(workers):
    parameter, exp_avg, exp_avg_sq, gradient = torch.ones(4, 1 << 24)
    running, over = threading.Event(), threading.Event()

    def update():
        running.set()
        adam_(parameter, exp_avg, exp_avg_sq, [gradient], Hyper(1e-3), 1, workers=workers)
        over.set()

    thread = threading.Thread(target=update)
    thread.start()
    running.wait()
    count = 0
    while not over.is_set():
        count += 1
    thread.join()
    assert count > 100


@pytest.mark.parametrize(("count", "cpus"), [(0, None), (1, []), (1, [100_000])])
def test_impossible_threads_are_refused(count, cpus):
    with pytest.raises(ValueError, match="workers: "):
        Workers(count, cpus)
