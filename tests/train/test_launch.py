"""The ranks of one command start, fail, die and restart together."""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import UserError
from shardlab.kernels.cpu_placement import RankLocation
from shardlab.train.launch import RunFailed, launch, launch_together
from shardlab.train.rank import bind_cpus
from tests.commands import launching, wait_for
from tests.ranks import on_ranks
from tests.train.workers import (
    adds_up,
    dies_at_first,
    mistaken,
    one_fails,
    raising,
    signalled,
    sums_for_ever,
)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_ranks_have_local_rank_and_thread_count(tmp_path):
    def worker(group):
        adds_up(tmp_path)(group)
        assert torch.get_num_threads() == 1

    launch(worker, 3, threads=1, timeout_s=30)
    assert [(tmp_path / name).read_text() for name in "012"] == ["3 0/3", "3 1/3", "3 2/3"]


@on_ranks(3)
def test_values_and_bytes_are_gathered_in_rank_order(group) -> None:
    rank = dist.get_rank(group)
    assert gather_values({"rank": rank}, group) == [{"rank": r} for r in range(3)]
    assert gather_values(b"x" * rank, group) == [b"", b"x", b"xx"]


@pytest.mark.parametrize(
    ("fault", "kind", "said"),
    [
        (raising(ArithmeticError("on purpose")), "crash", r"ArithmeticError: on purpose"),
        (raising(MemoryError("on purpose")), "memory", r"MemoryError: on purpose"),
        (lambda: os._exit(3), "crash", "ended with exit code 3"),
        (signalled(signal.SIGKILL), "memory", r"was killed by signal 9 \(SIGKILL, out of memory"),
        (signalled(signal.SIGTERM), "crash", r"was killed by signal 15 \(SIGTERM\)"),
        pytest.param(
            *(signalled(signal.SIGSTOP), "crash", "rank [02]: .*Timed out"), marks=pytest.mark.long
        ),
    ],
)
def test_the_rank_that_is_the_cause_is_named_in_one_line(fault, kind, said):
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a handler that ranks must not have
    try:
        with pytest.raises(RunFailed, match=kind) as caught:
            launch(one_fails(1, fault), 3, 1, timeout_s=2 if "Timed" in said else 60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.kind == kind
    (line,) = caught.value.summary.splitlines()
    assert caught.match(said) and "rank 1" in line and "rank 1" in caught.value.detail


def test_run_over_its_time_limit_is_ended_without_restart():
    with pytest.raises(RunFailed, match=r"not done after 0\.2 s") as caught:
        launch(lambda group: time.sleep(60), 2, 1, 60, limit_s=0.2, max_restarts=9)
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_a_killed_command(tmp_path, number):
    command = launching(tmp_path, sums_for_ever(tmp_path), 2)
    wait_for(lambda: len([*tmp_path.glob("started.*")]) == 2)
    os.kill(command.pid, number)
    assert command.wait() != 0
    wait_for(lambda: not command.family())


def test_commands_run_together_until_one_fails(tmp_path):
    add = partial(launch, adds_up(tmp_path), 2, 1, 30)
    fail = partial(launch, one_fails(1, raising(OSError("on purpose"))), 2, 1, 30)
    launch_together({"first": add, "second": add})
    assert files(tmp_path) == ["0", "1"]
    with pytest.raises(RunFailed, match=r"rank 1: (?s:.*)OSError: on purpose"):
        launch_together({"first": lambda: time.sleep(60), "second": fail})


@pytest.mark.fresh_ranks
@on_ranks(2)
def test_named_cpus_bind_a_rank(group):
    ranks = [RankLocation([0, 1])] * 2
    bind_cpus(("0", "1"), ranks)
    assert os.sched_getaffinity(0) == {dist.get_rank(group)}
    for way, message in [(("0",), "CPUs for 1 of the 2 ranks"), (("99", "99"), "not use CPU 99")]:
        with pytest.raises(UserError, match=message):
            bind_cpus(way, ranks)


def test_crashed_run_restarts_with_new_ranks_a_limited_number_of_times(tmp_path, capfd):
    run = partial(launch, dies_at_first(1, tmp_path, times=3), 2, 1, 30)
    with pytest.raises(RunFailed, match="rank 1 was killed"):
        run(max_restarts=1)
    run(max_restarts=1)
    assert files(tmp_path) == [f"{attempt}.{rank}" for attempt in range(4) for rank in range(2)]
    restarts = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert restarts == 2 * [
        "restart 1 of 1: rank 1 was killed by signal 9 (SIGKILL, out of memory?)"
    ]


def test_a_mistake_of_the_user_is_one_line_and_not_retried(tmp_path):
    def worker(group):
        (tmp_path / str(dist.get_rank(group))).touch(exist_ok=False)
        mistaken(group)

    with pytest.raises(UserError, match=r"^train.steps: too many$"):
        launch(worker, 2, 1, 30, max_restarts=5)
