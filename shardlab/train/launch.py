"""Starts the ranks of a run, or joins those that torchrun started, and never leaves one behind."""

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal, NoReturn, Protocol

import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.process import die_with_parent

Worker = Callable[[dist.ProcessGroup], None]


class Interfaces(Protocol):
    """Where ranks open their sockets: `shardlab.comm.links.Links`, for one."""

    def enter(self, rank: int) -> str:
        """Called by the process of the rank; returns the name of its network interface."""


class RunFailed(RuntimeError):
    """A run that did not end well."""

    def __init__(self, kind: Literal["timeout", "crash", "memory"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


def under_torchrun() -> bool:
    """Whether this process is one rank of a job that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(
    worker: Worker,
    world_size: int,
    threads: int,
    timeout_s: float,
    limit_s: float | None = None,
    links: Interfaces | None = None,
) -> None:
    """Runs `worker` on every rank and returns when all are done.

    The ranks are forked from this process, after its imports: starting one takes milliseconds
    instead of seconds. Under torchrun this process is a rank itself. CPU ranks use gloo.

    Args:
        threads: CPU threads per rank.
        timeout_s: longest wait for another rank in one collective.
        limit_s: longest duration of the whole run.
        links: the ranks talk over these instead of the loopback interface.

    Raises:
        RunFailed: a rank failed, with the error of the rank that failed first, or time ran out.
        UserError: raised by the worker, or torchrun started another number of ranks, or ranks that
            links cannot reach.
    """
    if under_torchrun():
        if links is not None:
            raise UserError(
                "torchrun's ranks are where they are: start without it to emulate links"
            )
        _join(worker, world_size, threads, timeout_s)
        return
    with tempfile.TemporaryDirectory(prefix="shardlab-") as folder:
        context = multiprocessing.get_context("fork")
        arguments = (worker, world_size, threads, timeout_s, Path(folder), os.getpid(), links)
        ranks = [
            context.Process(target=_rank, args=(rank, *arguments), name=f"rank {rank}")
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        try:
            _supervise(ranks, Path(folder), limit_s)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _join(worker: Worker, world_size: int, threads: int, timeout_s: float) -> None:
    started = int(os.environ["WORLD_SIZE"])
    if started != world_size:
        raise UserError(
            f"torchrun started {started} ranks, train.world_size says {world_size}: make them equal"
        )
    die_with_parent(os.getppid())
    _run(worker, threads, init_method="env://", timeout=timedelta(seconds=timeout_s))


def _rank(
    rank: int,
    worker: Worker,
    world_size: int,
    threads: int,
    timeout_s: float,
    folder: Path,
    parent: int,
    links: Interfaces | None,
) -> None:
    die_with_parent(parent)
    try:
        # ranks of one machine need no other interface, and a host name may not resolve
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if links is None else links.enter(rank)
        _run(
            worker,
            threads,
            store=dist.FileStore(str(folder / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except BaseException as error:
        _report(error, rank, folder)


def _run(worker: Worker, threads: int, **rendezvous: object) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", **rendezvous)  # type: ignore[arg-type]
    try:
        group = dist.group.WORLD
        assert group is not None
        # a rank that is done at once must not leave while others are connecting to it
        dist.barrier()
        worker(group)
    finally:
        dist.destroy_process_group()


def _report(error: BaseException, rank: int, folder: Path) -> NoReturn:
    """Leaves the error where the parent finds it: the first line says how it is to be told."""
    kinds: dict[type[BaseException], str] = {UserError: "user", MemoryError: "memory"}
    kind = kinds.get(type(error), "crash")
    text = str(error) if kind == "user" else f"rank {rank}: {traceback.format_exc()}"
    partial = folder / f"{rank}.partial"
    partial.write_text(f"{kind}\n{text}")
    partial.rename(folder / f"{rank}.error")
    # a process group that failed may hang in its destructors
    os._exit(1)


def _supervise(ranks: list[ForkProcess], folder: Path, limit_s: float | None) -> None:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ended = wait(list(running), timeout=left)
        if not ended:
            raise RunFailed("timeout", f"not done after {limit_s:g} s")
        for sentinel in ended:
            rank = running.pop(sentinel)  # type: ignore[arg-type]
            rank.join()
            if rank.exitcode != 0:
                _raise_first_error(rank, ranks, folder)


def _raise_first_error(ended: ForkProcess, ranks: list[ForkProcess], folder: Path) -> NoReturn:
    """Tells of the rank that failed first.

    A killed rank leaves no words, and its peers notice within milliseconds: a signal that is there
    by then is the cause, whatever the peers complain of.
    """
    wait([rank.sentinel for rank in ranks if rank.exitcode is None], timeout=0.2)
    killed = next((r for r in ranks if r.exitcode is not None and r.exitcode < 0), None)
    if killed is not None:
        number = -(killed.exitcode or 0)
        hint = " (out of memory?)" if number == signal.SIGKILL else ""
        detail = f"{killed.name} was killed by signal {number}{hint}"
        raise RunFailed("memory" if number == signal.SIGKILL else "crash", detail)
    errors = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not errors:
        raise RunFailed("crash", f"{ended.name} ended with exit code {ended.exitcode}")
    told, _, text = errors[0].read_text().partition("\n")
    if told == "user":
        raise UserError(text)
    raise RunFailed("memory" if told == "memory" else "crash", text.strip())
