"""Ranks without a launcher, which detect by themselves how others end."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from shardlab.core.process import die_with_parent

Function = Callable[[dist.ProcessGroup], object]


def outcomes(world_size: int, function: Function, stopped: Sequence[int] = ()) -> list[str]:
    """Return the result of `function` on each rank, or the error that it raised, or `exit CODE`.

    Args:
        stopped: ranks that stop themselves; they are killed when the others have ended.
    """
    parent, fork = os.getpid(), get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")

        def run(rank: int) -> None:
            die_with_parent(parent)
            _run(rank, world_size, function, store, pipes[rank][1])

        ranks = [fork.Process(target=run, args=(rank,)) for rank in range(world_size)]
        for process in ranks:
            process.start()
        for rank in [*(set(range(world_size)) - set(stopped)), *stopped]:
            if rank in stopped:
                ranks[rank].kill()
            ranks[rank].join(60)
    return [
        pipe.recv_bytes().decode() if pipe.poll() else f"exit {process.exitcode}"
        for (pipe, _), process in zip(pipes, ranks, strict=True)
    ]


def _run(rank: int, world_size: int, function: Function, store: Path, pipe: Connection) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=30),
    )
    dist.barrier()
    group = dist.group.WORLD
    assert group is not None
    try:
        reported = str(function(group))
    except Exception as error:
        reported = f"{type(error).__name__}: {error}"
    pipe.send_bytes(reported.encode())
    os._exit(0)  # a group with lost ranks may hang in its destructors
