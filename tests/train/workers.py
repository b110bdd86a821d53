"""Workers of the ranks in the tests of the launcher."""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.train.launch import Worker


def adds_up(folder: Path) -> Worker:
    """Leave a file RANK with the sum of all ranks and the rank on the machine."""

    def worker(group: dist.ProcessGroup) -> None:
        total = torch.tensor(float(dist.get_rank(group)))
        dist.all_reduce(total, group=group)
        here = f"{os.environ['LOCAL_RANK']}/{os.environ['LOCAL_WORLD_SIZE']}"
        (folder / str(dist.get_rank(group))).write_text(f"{int(total)} {here}")

    return worker


def sleeps(folder: Path) -> Worker:
    """Leave a file RANK.PID and do nothing for two minutes."""

    def worker(group: dist.ProcessGroup) -> None:
        (folder / f"{dist.get_rank(group)}.{os.getpid()}").touch()
        time.sleep(120)

    return worker


def sums_for_ever(folder: Path) -> Worker:
    """Leave a file RANK.PID and communicate without end."""

    def worker(group: dist.ProcessGroup) -> None:
        (folder / f"{dist.get_rank(group)}.{os.getpid()}").touch()
        while True:
            dist.all_reduce(torch.ones(1000), group=group)

    return worker


def pids(folder: Path, count: int) -> list[int] | None:
    """Return the process ids of `count` ranks, in rank order; None before all have started."""
    found = sorted((int(p.stem), int(p.suffix[1:])) for p in folder.glob("[0-9]*.*"))
    return [pid for _, pid in found] if len(found) == count else None


def one_raises(rank: int, error: Exception) -> Worker:
    """Fail on one rank; the others lose their connections to it."""

    def worker(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == rank:
            raise error
        dist.all_reduce(torch.ones(1000), group=group)

    return worker


def one_dies(rank: int, number: signal.Signals = signal.SIGKILL) -> Worker:
    """Fail on one rank; the others lose their connections to it."""

    def worker(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == rank:
            os.kill(os.getpid(), number)
        dist.all_reduce(torch.ones(1000), group=group)

    return worker


def dies_at_first(rank: int, folder: Path, times: int = 1) -> Worker:
    """Kill one rank between two sums in the first attempts; leave a file ATTEMPT.RANK."""

    def worker(group: dist.ProcessGroup) -> None:
        me = dist.get_rank(group)
        attempt = len(list(folder.glob(f"*.{me}")))
        (folder / f"{attempt}.{me}").touch()
        total = torch.tensor(1.0)
        dist.all_reduce(total, group=group)
        if me == rank and attempt < times:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total, group=group)
        assert int(total) == dist.get_world_size(group) ** 2

    return worker


def mistaken(group: dist.ProcessGroup) -> None:
    raise UserError("train.steps: too many")
