"""Turns of several timings: one at a time, the one that has done least, all to the end."""

import os
import signal
import time
from pathlib import Path

import pytest

from shardlab.core.errors import UserError
from shardlab.train.launch import RunFailed, launch_together
from shardlab.train.turns import Turns
from tests.commands import is_running


def take_turns(turns: Turns, path: Path, number: int, repetitions: int) -> None:
    """Write a line at the begin and the end of each turn, as the only rank of a timing."""
    turn = turns.of(number, 0)
    time.sleep(0.05 * number)
    for repetition in range(repetitions + 1):
        turn.wait(repetition / repetitions)
        for edge in ("begin", "end"):
            with path.open("a") as file:
                file.write(f"{edge} {number} {repetition}\n")
            time.sleep(0.001)
    turn.leave()


def test_one_timing_at_a_time_does_a_repetition(tmp_path):
    path, repetitions = tmp_path / "turns", [3, 12, 5]
    turns = Turns([1, 1, 1])
    launch_together(
        {
            str(number): lambda number=number, count=count: take_turns(turns, path, number, count)
            for number, count in enumerate(repetitions)
        }
    )
    lines = path.read_text().splitlines()
    assert len(lines) == 2 * sum(count + 1 for count in repetitions)
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.split() == ["begin", *end.split()[1:]]
    # nobody begins another repetition before those that have done a smaller share of theirs
    done = dict.fromkeys(range(3), 0.0)
    for line in lines[::2]:
        _, number, repetition = map(str, line.split())
        assert done[int(number)] == min(done.values())
        done[int(number)] = (int(repetition) + 1) / repetitions[int(number)]


def test_all_ranks_of_a_timing_have_its_turn(tmp_path):
    turns = Turns([2, 1])
    path = tmp_path / "order"

    def work(timing: int, rank: int) -> None:
        turn = turns.of(timing, rank)
        turn.wait(0)
        with path.open("a") as file:
            file.write(f"{timing}")
        time.sleep(0.2)  # longer than the other rank takes to follow: no barrier is here
        turn.leave()

    launch_together(
        {
            f"{timing}.{rank}": lambda timing=timing, rank=rank: work(timing, rank)
            for timing, rank in ((0, 0), (0, 1), (1, 0))
        }
    )
    assert path.read_text() == "001"


def test_an_error_ends_those_that_wait(tmp_path):
    pids = tmp_path / "pids"

    def wait(number: int) -> None:
        with pids.open("a") as file:
            file.write(f"{os.getpid()}\n")
        Turns([1, 1]).of(number, 0).wait(0)

    def fail() -> None:
        while not pids.exists():
            time.sleep(0.01)
        raise UserError("no such file: write one")

    with pytest.raises(UserError, match="no such file: write one"):
        launch_together({"waits": lambda: wait(0), "fails": fail})
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())


def test_a_process_that_is_killed_is_named():
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"timing b was killed by signal 9 \(SIGKILL"):
        launch_together({"timing b": die})
