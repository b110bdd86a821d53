import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shardlab.kernels import native
from shardlab.kernels.adam import Hyper, adam_
from shardlab.kernels.workers import Workers
from tests.kernels.adam_cases import Case, stepped

CASE = Case(n=100_003)


def threads():
    """The processors of each of this process's worker threads."""
    tasks = Path("/proc/self/task").iterdir()
    workers = [task.name for task in tasks if (task / "comm").read_text() == "shardlab-worker\n"]
    return [sorted(os.sched_getaffinity(int(number))) for number in workers]


def test_each_thread_is_pinned_to_its_processor_and_ends_with_the_pool():
    if not native.available():
        pytest.skip("no compiled kernels")
    before, cpu = threads(), max(os.sched_getaffinity(0))
    workers = Workers(3, [cpu])
    assert threads() == before
    stepped(CASE, workers)
    assert sorted(threads()) == sorted([*before, *[[cpu]] * 3])
    workers.close()
    assert sorted(threads()) == sorted(before)
    stepped(CASE, workers)
    assert len(threads()) == len(before) + 3


def test_threads_without_a_processor_of_theirs_run_where_their_caller_may():
    if not native.available():
        pytest.skip("no compiled kernels")
    before, own = threads(), sorted(os.sched_getaffinity(0))
    workers = Workers(2)
    stepped(CASE, workers)
    assert sorted(threads()) == sorted([*before, own, own])
    workers.close()


def test_many_callers_share_the_threads():
    expected, workers = stepped(CASE), Workers(2)
    with ThreadPoolExecutor(4) as callers:
        assert all(callers.map(lambda _: stepped(CASE, workers) == expected, range(20)))


def test_a_forked_process_starts_threads_of_its_own():
    expected, workers = stepped(CASE), Workers(2)
    stepped(CASE, workers)
    # forked while a caller holds the pool
    stop = threading.Event()

    def go_on():
        while not stop.is_set():
            stepped(CASE, workers)

    caller = threading.Thread(target=go_on)
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


@pytest.mark.parametrize("workers", [None, Workers(1)])
def test_other_threads_go_on_while_a_kernel_runs(workers):
    if not native.available():
        pytest.skip("no compiled kernels")
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
def test_threads_that_cannot_be_are_refused(count, cpus):
    with pytest.raises(ValueError, match="workers: "):
        Workers(count, cpus)
