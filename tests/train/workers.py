"""Workers of the ranks in the tests of the launcher."""

import os
import signal
from collections.abc import Callable
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


def sums_for_ever(folder: Path) -> Worker:
    """Leave a file started.RANK and communicate without end."""

    def worker(group: dist.ProcessGroup) -> None:
        (folder / f"started.{dist.get_rank(group)}").touch()
        while True:
            dist.all_reduce(torch.ones(1000), group=group)

    return worker


def one_fails(rank: int, fault: Callable[[], object]) -> Worker:
    """Fail on one rank; the others lose their connections to it."""

    def worker(group: dist.ProcessGroup) -> None:
        if dist.get_rank(group) == rank:
            fault()
        dist.all_reduce(torch.ones(1000), group=group)

    return worker


def raising(error: Exception) -> Callable[[], None]:
    def fault() -> None:
        raise error

    return fault


def signalled(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def dies_at_first(rank: int, folder: Path, times: int = 1) -> Worker:
    """Kill one rank between two sums in the first attempts; leave a file ATTEMPT.RANK."""

    def worker(group: dist.ProcessGroup) -> None:
        me = dist.get_rank(group)
        attempt = len(list(folder.glob(f"[0-9].{me}")))
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
