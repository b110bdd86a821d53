"""Ranks of a node know how far the others are, and who cannot go on and why."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shardlab.engines.slide.node import NodeMemory
from shardlab.launch import RunFailed, launch
from tests.engines.slide.lone_ranks import outcomes
from tests.ranks import run_ranks

UNITS = 3


def control_of(group, timeout_s=30.0):
    return NodeMemory.create(group, {}, ["landed", "updated"], UNITS, timeout_s).control


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_wait_ends_when_all_ranks_have_published(world_size):
    def on_rank(group):
        control, rank = control_of(group), dist.get_rank(group)
        for step in range(1, 50):
            for unit in range(UNITS):
                control.publish("landed", unit, step)
                control.wait("landed", unit, step)
                control.publish("updated", unit, step)
        control.wait("updated", 0, 49, ranks=[world_size - 1 - rank])
        control.close()
        return {}

    run_ranks(world_size, on_rank)


def test_kinds_units_and_ranks_are_counted_apart():
    def on_rank(group):
        control, rank = control_of(group, timeout_s=0.2), dist.get_rank(group)
        if rank == 1:
            control.publish("landed", 1, 7)
        dist.barrier(group)
        control.wait("landed", 1, 7, ranks=[1])
        if rank == 0:
            for kind, unit, step, of in [
                ("landed", 1, 8, 1),
                ("landed", 0, 1, 1),
                ("landed", 2, 1, 1),
                ("updated", 1, 1, 1),
                ("landed", 1, 1, 0),
            ]:
                word = control._word(of, kind, unit)
                assert not control._words.wait(word, step, 0.0)
        dist.barrier(group)
        return {}

    run_ranks(2, on_rank)


def test_a_killed_rank_is_named_by_every_other():
    """Long before the timeout, in one line, also by those that wait for someone else."""

    def function(group):
        control, rank = control_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        control.wait("landed", 0, 1, ranks=[(rank + 1) % 4])

    told = outcomes(4, function)
    gone = "RuntimeError: rank 1 gone: killed, or ended with an error of its own"
    assert told == [gone, "exit -9", gone, gone]


def test_a_rank_killed_in_the_middle_of_its_work_is_named():
    def function(group):
        control, rank = control_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 2:
            threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGKILL]).start()
        for step in range(1, 1 << 30):
            control.publish("landed", 0, step)
            control.wait("landed", 0, step)

    told = outcomes(3, function)
    gone = "RuntimeError: rank 2 gone: killed, or ended with an error of its own"
    assert told == [gone, gone, "exit -9"]


def test_what_a_rank_says_of_its_failure_reaches_all_others():
    def function(group):
        control, rank = control_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 2:
            control.fail("the disk is full: größer wäre besser\nTraceback")
            control.fail("and then this")
            return "failed"
        return control.wait("updated", 1, 4, ranks=[1 - rank])

    told = "RuntimeError: rank 2: the disk is full: größer wäre besser"
    assert outcomes(3, function) == [told, told, "failed"]


def test_a_long_account_is_cut_not_lost():
    def function(group):
        control = control_of(group, timeout_s=600)
        if dist.get_rank(group) == 0:
            control.fail("ä" * 5000)
            return ""
        return control.wait("landed", 0, 1)

    assert outcomes(2, function)[1].startswith("RuntimeError: rank 0: " + "ä" * 400)


def test_the_first_of_several_failures_is_told():
    def function(group):
        control, rank = control_of(group, timeout_s=600), dist.get_rank(group)
        if rank == 2:
            control.fail("the cause")
        dist.barrier(group)
        if rank == 1:
            control.fail("a consequence")
        dist.barrier(group)
        return control.check()

    assert outcomes(3, function) == ["RuntimeError: rank 2: the cause"] * 3


def test_a_stopped_rank_is_silent_and_named():
    """Also by who waits for a rank that itself waits for the stopped one."""

    def function(group):
        control, rank = control_of(group, timeout_s=1.0), dist.get_rank(group)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        control.wait("landed", 2, 5, ranks=[rank + 1])

    first, second, third = outcomes(3, function, stopped=[2])
    assert first == second
    assert first.startswith("RuntimeError: rank 2 silent (stopped by a signal): Timed out")
    assert third == "exit -9"


def test_ranks_that_do_something_else_are_silent_for_all():
    def function(group):
        control, rank = control_of(group, timeout_s=0.5), dist.get_rank(group)
        if rank in (1, 2):
            time.sleep(1.5)
            return control.check()
        control.publish("landed", 2, 5)
        return control.wait("landed", 2, 5)

    goal = "Timed out waiting 0.5 s for 'landed' of unit 2 in step 5"
    told = f"RuntimeError: rank 1, rank 2 silent: {goal}"
    assert outcomes(4, function)[:3] == [told] * 3


def test_what_a_rank_published_before_it_left_still_counts():
    def function(group):
        control = control_of(group, timeout_s=600)
        if dist.get_rank(group) == 1:
            control.publish("landed", 0, 3)
            control.close()
            return "left"
        control.wait("landed", 0, 3, ranks=[1])
        control.check()
        return control.wait("landed", 0, 4, ranks=[1])

    told = "RuntimeError: rank 1 left before 'landed' of unit 0 in step 4"
    assert outcomes(2, function) == [told, "left"]


def test_ranks_are_named_as_the_run_does():
    def function(group):
        node = dist.new_group([1, 2], use_local_synchronization=True)
        if dist.get_rank(group) == 0:
            return ""
        control = control_of(node, timeout_s=600)
        if dist.get_rank(group) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return control.wait("landed", 0, 1, ranks=[1])

    assert "rank 2 gone" in outcomes(3, function)[1]


def test_the_launcher_tells_the_failed_rank_and_why():
    def worker(group):
        control = control_of(group)
        if dist.get_rank(group) == 1:
            try:
                raise OSError("no space left")
            except OSError as error:
                control.fail(str(error))
                raise
        control.wait("landed", 0, 1)

    with pytest.raises(RunFailed, match=r"(?s)^crash: rank 1: .*no space left"):
        launch(worker, 3, threads=1, timeout_s=30)


def test_the_launcher_names_a_stopped_rank():
    def worker(group):
        control = control_of(group, timeout_s=1.0)
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        control.wait("landed", 0, 1)

    with pytest.raises(RunFailed, match=r"^crash: rank 1: stopped by a signal: "):
        launch(worker, 2, threads=1, timeout_s=30)


def test_many_threads_of_a_rank_may_publish_and_wait():
    def on_rank(group):
        control = control_of(group)

        def work(unit):
            for step in range(1, 300):
                control.publish("updated", unit, step)
                control.wait("updated", unit, step)

        threads = [threading.Thread(target=work, args=[unit]) for unit in range(UNITS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"last": torch.tensor(control._words.read(control._word(0, "updated", 0)))}

    assert [int(result["last"]) for result in run_ranks(2, on_rank)] == [299, 299]
