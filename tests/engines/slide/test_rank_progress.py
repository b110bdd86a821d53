"""Waits for the progress of other ranks, and propagation of failures."""

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from shardlab.engines.slide.shared_memory import NodeMemory
from shardlab.train.launch import RunFailed, launch
from tests.engines.slide.unwatched_ranks import outcomes
from tests.ranks import on_ranks

pytestmark = pytest.mark.fresh_ranks

UNITS = 3


def progress_of(group, timeout_s=30.0):
    return NodeMemory.create(group, {}, UNITS, timeout_s).progress


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_a_wait_ends_when_all_ranks_have_published(group, world_size) -> None:
    progress, rank = progress_of(group), dist.get_rank(group)
    for step in range(1, 50):
        for unit in range(UNITS):
            progress.publish("offloaded", unit, step)
            progress.wait("offloaded", unit, step)
            progress.publish("updated", unit, step)
    progress.wait("updated", 0, 49, ranks=[world_size - 1 - rank])
    progress.close()


@on_ranks(2)
def test_events_units_and_ranks_have_separate_counters(group) -> None:
    progress, rank = progress_of(group, timeout_s=0.2), dist.get_rank(group)
    if rank == 1:
        progress.publish("offloaded", 1, 7)
    dist.barrier(group)
    progress.wait("offloaded", 1, 7, ranks=[1])
    if rank == 0:
        for kind, unit, step, of in [
            ("offloaded", 1, 8, 1),
            ("offloaded", 0, 1, 1),
            ("offloaded", 2, 1, 1),
            ("updated", 1, 1, 1),
            ("offloaded", 1, 1, 0),
        ]:
            counter = progress._counter(of, kind, unit)
            assert not progress._counters.wait(counter, step, 0.0)
    dist.barrier(group)


def test_a_killed_rank_is_named_by_every_other():
    """Long before the timeout, in one line, also by those that wait for someone else."""

    def function(group):
        progress, rank = progress_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        progress.wait("offloaded", 0, 1, ranks=[(rank + 1) % 4])

    found = outcomes(4, function)
    gone = "RuntimeError: rank 1 gone: killed, or ended with an error of its own"
    assert found == [gone, "exit -9", gone, gone]


def test_a_rank_killed_in_the_middle_of_its_work_is_named():
    def function(group):
        progress, rank = progress_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 2:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
        for step in range(1, 1 << 30):
            progress.publish("offloaded", 0, step)
            progress.wait("offloaded", 0, step)

    found = outcomes(3, function)
    gone = "RuntimeError: rank 2 gone: killed, or ended with an error of its own"
    assert found == [gone, gone, "exit -9"]


def test_error_of_a_rank_reaches_all_others():
    def function(group):
        progress, rank = progress_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 2:
            progress.fail("the disk is full: größer wäre besser\nTraceback")
            progress.fail("and then this")
            return "failed"
        return progress.wait("updated", 1, 4, ranks=[1 - rank])

    found = "RuntimeError: rank 2: the disk is full: größer wäre besser"
    assert outcomes(3, function) == [found, found, "failed"]


def test_a_long_error_is_cut_not_lost():
    def function(group):
        progress = progress_of(group, timeout_s=600)
        if dist.get_rank(group) == 0:
            progress.fail("ä" * 5000)
            return ""
        return progress.wait("offloaded", 0, 1)

    assert outcomes(2, function)[1].startswith("RuntimeError: rank 0: " + "ä" * 400)


def test_the_first_of_several_failures_is_raised():
    def function(group):
        progress, rank = progress_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 2:
            progress.fail("the cause")
        dist.barrier(group)
        if rank == 1:
            progress.fail("a consequence")
        dist.barrier(group)
        return progress.check()

    assert outcomes(3, function) == ["RuntimeError: rank 2: the cause"] * 3


def test_a_stopped_rank_is_silent_and_named():
    """Also by who waits for a rank that itself waits for the stopped one."""

    def function(group):
        progress, rank = progress_of(group, timeout_s=1.0), dist.get_rank(group)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        progress.wait("offloaded", 2, 5, ranks=[rank + 1])

    first, second, third = outcomes(3, function, stopped=[2])
    assert first == second
    assert first.startswith("RuntimeError: rank 2 silent (stopped by a signal): Timed out")
    assert third == "exit -9"


def test_ranks_that_do_something_else_are_silent_for_all():
    def function(group):
        progress, rank = progress_of(group, timeout_s=0.5), dist.get_rank(group)
        if rank in (1, 2):
            time.sleep(1.5)
            return progress.check()
        progress.publish("offloaded", 2, 5)
        return progress.wait("offloaded", 2, 5)

    goal = "Timed out waiting 0.5 s for 'offloaded' of unit 2 in step 5"
    found = f"RuntimeError: rank 1, rank 2 silent: {goal}"
    assert outcomes(4, function)[:3] == [found] * 3


def test_published_progress_stays_after_a_rank_closes():
    def function(group):
        progress = progress_of(group, timeout_s=600)
        if dist.get_rank(group) == 1:
            progress.publish("offloaded", 0, 3)
            progress.close()
            return "left"
        progress.wait("offloaded", 0, 3, ranks=[1])
        progress.check()
        return progress.wait("offloaded", 0, 4, ranks=[1])

    found = "RuntimeError: rank 1 left before 'offloaded' of unit 0 in step 4"
    assert outcomes(2, function) == [found, "left"]


def test_errors_name_ranks_of_the_whole_run():
    def function(group):
        node = dist.new_group([1, 2], use_local_synchronization=True)
        if dist.get_rank(group) == 0:
            return ""
        progress = progress_of(node, timeout_s=600)
        if dist.get_rank(group) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return progress.wait("offloaded", 0, 1, ranks=[1])

    assert "rank 2 gone" in outcomes(3, function)[1]


def test_the_launcher_names_the_failed_rank_and_its_error():
    def worker(group):
        progress = progress_of(group)
        if dist.get_rank(group) == 1:
            try:
                raise OSError("no space left")
            except OSError as error:
                progress.fail(str(error))
                raise
        progress.wait("offloaded", 0, 1)

    with pytest.raises(RunFailed, match=r"(?s)^crash: rank 1: .*no space left"):
        launch(worker, 3, threads=1, timeout_s=30)


def test_the_launcher_names_a_stopped_rank():
    def worker(group):
        progress = progress_of(group, timeout_s=1.0)
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        progress.wait("offloaded", 0, 1)

    with pytest.raises(RunFailed, match=r"^crash: rank 1: stopped by a signal: "):
        launch(worker, 2, threads=1, timeout_s=30)


@on_ranks(2)
def test_many_threads_of_a_rank_may_publish_and_wait(group) -> None:
    progress = progress_of(group)

    def work(unit):
        for step in range(1, 300):
            progress.publish("updated", unit, step)
            progress.wait("updated", unit, step)

    threads = [threading.Thread(target=work, args=[unit]) for unit in range(UNITS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert progress._counters.read(progress._counter(0, "updated", 0)) == 299
