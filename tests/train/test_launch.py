"""The ranks of one command start, fail, die and restart together."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.object_collectives import gather_values
from shardlab.core.errors import UserError
from shardlab.engines.cpu_placement import RankLocation
from shardlab.train.launch import RunFailed, launch, launch_together
from shardlab.train.rank import Failure, bind_cpus, cause_of
from tests.commands import launching, wait_for
from tests.ranks import on_ranks
from tests.train.workers import (
    adds_up,
    dies_at_first,
    mistaken,
    one_dies,
    one_raises,
    pids,
    sleeps,
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
    ("error", "kind"),
    [(ArithmeticError("on purpose"), "crash"), (MemoryError("on purpose"), "memory")],
)
def test_the_first_error_is_reported(error, kind):
    with pytest.raises(RunFailed, match="on purpose") as caught:
        launch(one_raises(1, error), 3, 1, timeout_s=30)
    assert caught.value.kind == kind
    assert caught.value.detail.startswith("rank 1: Traceback")
    assert "onnection" not in caught.value.detail


def test_silent_exit_is_reported():
    def worker(group):
        if dist.get_rank(group) == 1:
            os._exit(3)
        dist.barrier(group)

    with pytest.raises(RunFailed, match="rank 1 ended with exit code 3"):
        launch(worker, 2, 1, timeout_s=30)


@pytest.mark.parametrize(
    ("number", "kind", "message"),
    [
        (signal.SIGKILL, "memory", r"rank 1 was killed by signal 9 \(SIGKILL, out of memory\?\)"),
        (signal.SIGTERM, "crash", r"rank 1 was killed by signal 15 \(SIGTERM\)"),
    ],
)
def test_a_killed_rank_is_named_with_its_signal(number, kind, message):
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # a handler that ranks must not have
    try:
        with pytest.raises(RunFailed, match=message) as caught:
            launch(one_dies(1, number), 3, 1, timeout_s=60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.kind == kind


def test_run_over_its_time_limit_is_ended_without_restart():
    with pytest.raises(RunFailed, match=r"not done after 0\.5 s") as caught:
        launch(lambda group: time.sleep(60), 2, 1, 60, limit_s=0.5, max_restarts=9)
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_rank_outlives_a_killed_command(tmp_path, number):
    command = launching(tmp_path, sleeps(tmp_path), 2)
    wait_for(lambda: pids(tmp_path, 2) is not None)
    os.kill(command.pid, number)
    assert command.wait() != 0
    wait_for(lambda: not command.family())


@pytest.mark.long
def test_a_rank_that_stops_or_hangs_is_named_by_those_that_time_out():
    with pytest.raises(RunFailed, match=r"^crash: no report from rank 1: rank [02]: .*Timed out"):
        launch(one_dies(1, signal.SIGSTOP), 3, 1, timeout_s=2)


def test_the_cause_is_the_failure_that_names_no_other_rank():
    lost = Failure("crash", "rank 0: RuntimeError: Connection closed by peer", seconds=1.0)
    late = Failure("crash", "rank 2: ValueError: on purpose", seconds=2.0)
    killed = Failure("memory", "rank 1 was killed by signal 9")
    assert cause_of({"rank 0": lost, "rank 2": late}) == late
    assert cause_of({"rank 0": lost, "rank 1": killed, "rank 2": late}) == killed
    silent = cause_of({"rank 0": lost, "rank 1": None})
    assert silent.summary == f"no report from rank 1: {lost.summary}"
    assert cause_of({"rank 0": lost}) == lost


def test_commands_run_together_until_one_fails(tmp_path):
    def command(number: int) -> None:
        launch(adds_up(tmp_path) if number == 0 else one_raises(1, OSError("on purpose")), 2, 1, 30)

    launch_together({"first": lambda: command(0), "second": lambda: command(0)})
    assert files(tmp_path) == ["0", "1"]
    with pytest.raises(RunFailed, match=r"rank 1: (?s:.*)OSError: on purpose"):
        launch_together({"first": lambda: time.sleep(60), "second": lambda: command(1)})


@pytest.mark.fresh_ranks
@on_ranks(2)
def test_named_cpus_bind_a_rank(group):
    ranks = [RankLocation([0, 1])] * 2
    bind_cpus(("0", "1"), ranks)
    assert os.sched_getaffinity(0) == {dist.get_rank(group)}
    for way, message in [(("0",), "CPUs for 1 of the 2 ranks"), (("99", "99"), "not use CPU 99")]:
        with pytest.raises(UserError, match=message):
            bind_cpus(way, ranks)


def test_crashed_run_restarts_with_new_ranks(tmp_path, capfd):
    launch(dies_at_first(1, tmp_path, times=2), 3, 1, 30, max_restarts=3)
    assert files(tmp_path) == [f"{attempt}.{rank}" for attempt in range(3) for rank in range(3)]
    restarts = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    cause = "rank 1 was killed by signal 9 (SIGKILL, out of memory?)"
    assert restarts == [f"restart {n} of 3: {cause}" for n in (1, 2)]


def test_restarts_are_limited(tmp_path):
    with pytest.raises(RunFailed, match="rank 0 was killed"):
        launch(dies_at_first(0, tmp_path, times=9), 2, 1, 30, max_restarts=1)
    assert sorted(name.partition(".")[0] for name in files(tmp_path)) == ["0", "0", "1", "1"]


def test_a_mistake_of_the_user_is_one_line_and_not_retried(tmp_path):
    def worker(group):
        (tmp_path / str(dist.get_rank(group))).touch(exist_ok=False)
        mistaken(group)

    with pytest.raises(UserError, match=r"^train.steps: too many$"):
        launch(worker, 2, 1, 30, max_restarts=5)
