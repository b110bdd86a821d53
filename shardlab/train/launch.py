"""Start of the ranks of a run: forks of this process, or this process itself under torchrun.

The ranks of one command are forked after its imports, which takes milliseconds instead of seconds;
CUDA must not be in use before. A process that torchrun or srun started is one rank.
"""

import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from shardlab.comm.emulated_link import Links, Loopback
from shardlab.core.cpu_affinity import CpuAffinity
from shardlab.core.errors import RunFailed, UserError
from shardlab.core.files import temporary
from shardlab.core.launch_environment import RankEnvironment, rank_environment
from shardlab.core.process import begin_child, die_with_parent, raise_in_handler
from shardlab.core.progress import say
from shardlab.train.rank import LaunchConfig, Worker, failure_of

__all__ = ["RunFailed", "Worker", "launch", "launch_together"]

_END_S = 10.0
"""a killed rank closes its connections before the kernel shows its end, on a busy machine long"""
_TIMEOUTS_S = 3.0
"""ranks that wait for the same one time out one after the other, as they began to wait"""


def launch(
    worker: Worker,
    world_size: int,
    threads: int,
    timeout_s: float,
    limit_s: float | None = None,
    links: Links | Loopback | None = None,
    max_restarts: int = 0,
    placement: CpuAffinity = "auto",
) -> None:
    """Run `worker` on every rank and return when all are done.

    LOCAL_RANK and LOCAL_WORLD_SIZE locate a rank on its machine, or where nodes of emulated links
    have several ranks, on its node. If every rank has its own GPU, they use NCCL, and gloo for
    tensors in host memory; otherwise all use gloo.

    Args:
        world_size: number of ranks, on all nodes.
        threads: CPU threads per rank.
        timeout_s: longest wait for another rank, at the start and in each collective.
        limit_s: longest duration of the whole run.
        links: emulated links that the ranks use instead of the loopback interface.
        max_restarts: how often new ranks are started after a rank crashed or was killed.
        placement: which CPUs the ranks get.

    Raises:
        RunFailed: a rank failed, with the error of the rank that is the cause, or time ran out.
        UserError: raised by the worker; or the environment of torchrun or srun does not fit
            `world_size`, `links` or `max_restarts`; or `placement` names CPUs that do not exist.
    """
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: expected 0 or more")
    config = LaunchConfig(
        worker, world_size, threads, timedelta(seconds=timeout_s), links, placement
    )
    environment = rank_environment(world_size)
    if environment is None:
        _launch_local(config, limit_s, max_restarts)
        return
    if links is not None:
        raise UserError(
            "links are emulated between the ranks of one command: start it without torchrun or srun"
        )
    if max_restarts:
        raise UserError("--max-restarts: give it to torchrun, which restarts the ranks it started")
    _be_rank(config, environment, limit_s)


def launch_together(commands: Mapping[str, Callable[[], None]]) -> None:
    """Fork a process for each of several commands that call `launch`; return when all are done.

    Args:
        commands: by the names that failures of their processes have.

    Raises:
        RunFailed, UserError: of the first command that failed; no process of the others is left.
    """

    _run_forked(commands, math.inf)


def _launch_local(config: LaunchConfig, limit_s: float | None, max_restarts: int) -> None:
    """Fork all ranks, again after a failure that may be transient."""
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    for restart in range(1, max_restarts + 2):
        try:
            with temporary("shardlab-ranks") as folder:
                store = folder / "store"
                ranks = range(config.world_size)
                _run_forked(
                    {f"rank {n}": partial(config.run_forked, n, store) for n in ranks}, deadline
                )
            return
        except TimeoutError:
            raise _timed_out(limit_s) from None
        except RunFailed as failure:
            if restart > max_restarts:
                raise
            say(f"restart {restart} of {max_restarts}: {failure.summary}")


def _run_forked(works: Mapping[str, Callable[[], None]], deadline: float) -> None:
    """Fork a process for each work, and wait until all are done; leave none.

    Raises:
        RunFailed, UserError: the failure that caused those of the others.
        TimeoutError: the deadline came before.
    """
    fork = multiprocessing.get_context("fork")
    processes: dict[str, ForkProcess] = {}
    pipes: dict[str, Connection] = {}
    try:
        for name, work in works.items():
            pipes[name], reports = fork.Pipe(duplex=False)
            process = fork.Process(target=_begin, args=(name, work, reports, os.getpid()))
            process.start()
            processes[name] = process
            reports.close()  # so that the end of the process is that of its pipe
        _watch(processes, pipes, deadline)
    finally:
        for process in processes.values():
            process.kill()
        for process in processes.values():
            process.join()


def _begin(name: str, work: Callable[[], None], reports: Connection, parent: int) -> None:
    """Do a work in its process, which ends with its parent; report an error."""
    begin_child(parent)
    try:
        work()
    except BaseException as error:
        # before the connections of this process close, which lets others fail
        reports.send(failure_of(error, name))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that failed may hang in its destructors


def _watch(
    processes: Mapping[str, ForkProcess], pipes: Mapping[str, Connection], deadline: float
) -> None:
    """Wait until all processes are done.

    Raises:
        RunFailed, UserError: the first failure that is no consequence of another.
        TimeoutError: the deadline came before.
    """
    failures: list[RunFailed] = []
    running = {pipe: name for name, pipe in pipes.items()}
    while running:
        left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
        ready = wait(running, left)
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            name = running.pop(pipe)
            failure = _read_failure(name, processes[name], pipe)
            if failure is None:
                continue
            if not isinstance(failure, RunFailed) or not failure.is_consequence:
                raise failure
            failures.append(failure)
            # the cause may be a rank whose end the kernel has not shown yet
            patience = _TIMEOUTS_S if failure.hung else _END_S
            deadline = min(deadline, time.monotonic() + patience)
    if failures and running:
        summary = f"no report from {', '.join(running.values())}: {failures[0].summary}"
        raise RunFailed("crash", summary, summary)
    if failures:
        raise failures[0]
    if running:
        raise TimeoutError


def _read_failure(
    name: str, process: ForkProcess, pipe: Connection
) -> UserError | RunFailed | None:
    """Return what a process has reported, or how it ended; None: it is done."""
    try:
        failure: UserError | RunFailed = pipe.recv()
        return failure
    except EOFError:
        process.join()
    code = process.exitcode
    assert code is not None, "it has ended"
    if code >= 0:
        summary = f"{name} ended with exit code {code}"
        return RunFailed("crash", summary, summary) if code else None
    killed = -code == signal.SIGKILL
    hint = ", out of memory?" if killed else ""
    summary = f"{name} was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
    return RunFailed("memory" if killed else "crash", summary, summary)


def _be_rank(config: LaunchConfig, environment: RankEnvironment, limit_s: float | None) -> None:
    """Run the rank of this process."""
    die_with_parent(os.getppid())  # torchrun's agent may be killed without ending its processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or the agent would wait for the interpreter
    if limit_s is not None:
        signal.signal(signal.SIGALRM, partial(_expire, limit_s))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    os.environ["LOCAL_RANK"] = str(environment.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(environment.local_world_size)
    store = _connect(environment, config.timeout)
    try:
        # torchrun's agent reads what `record` writes
        record(config.run)(environment.rank, store)
    except BaseException as error:
        raise failure_of(error, f"rank {environment.rank}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _connect(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Open the key-value store of torchrun's agent; without an agent, rank 0 hosts it."""
    hosts = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = environment.master_addr, environment.master_port
    answers: SimpleQueue[dist.Store | Exception] = SimpleQueue()

    def connect() -> None:
        try:
            answers.put(dist.TCPStore(address, port, None, hosts, timeout, wait_for_workers=False))
        except Exception as error:
            answers.put(error)

    # in a thread: torch's time-out ends no wait for a listener that accepts and says nothing
    Thread(target=connect, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout.total_seconds())
    except Empty:
        answer = TimeoutError()
    if isinstance(answer, dist.Store):
        return answer
    if "EADDRINUSE" in str(answer):
        raise UserError(f"port {port} is in use: choose another in MASTER_PORT")
    if not isinstance(answer, TimeoutError | dist.DistNetworkError):
        raise answer
    summary = (
        f"rank {environment.rank}: rank 0 does not answer at MASTER_ADDR {address}, MASTER_PORT "
        f"{port}: start it, or choose another port if something else listens there"
    )
    raise RunFailed("timeout", summary, summary)


def _expire(limit_s: float, *_: Any) -> None:
    raise_in_handler(_timed_out(limit_s))


def _timed_out(limit_s: float | None) -> RunFailed:
    summary = f"not done after {limit_s:g} s"
    return RunFailed("timeout", summary, summary)
