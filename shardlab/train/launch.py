"""Start of the ranks of a run: forks of this process, or this process itself under torchrun.

The ranks of one command are forked after its imports, which takes milliseconds instead of seconds;
CUDA must not be in use before. A process that torchrun or srun started is one rank.
"""

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.multiprocessing import start_processes

from shardlab.comm.emulated_link import Links, Loopback
from shardlab.config.machine import CpuAffinity
from shardlab.core.errors import UserError
from shardlab.core.files import temporary
from shardlab.core.process import begin_fork, die_with_parent
from shardlab.core.progress import say
from shardlab.train.launch_environment import RankEnvironment, rank_environment
from shardlab.train.rank import Failure, Job, RunFailed, Worker, cause_of

__all__ = ["RunFailed", "Worker", "launch", "launch_together"]

_REPORTS_S = 0.5
"""a rank of another process that fails reports it before its connections close"""
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

    LOCAL_RANK and LOCAL_WORLD_SIZE locate a rank on its machine. If every rank has its own GPU,
    they use NCCL, and gloo for tensors in host memory; otherwise all use gloo.

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
        SystemExit: this process is one rank of torchrun or srun, and another reports the failure.
    """
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: expected 0 or more")
    job = Job(worker, world_size, threads, timedelta(seconds=timeout_s), links, placement)
    environment = rank_environment(world_size)
    if environment is None:
        _launch_local(job, limit_s, max_restarts)
        return
    if links is not None:
        raise UserError(
            "links are emulated between the ranks of one command: start it without torchrun or srun"
        )
    if max_restarts:
        raise UserError("--max-restarts: give it to torchrun, which restarts the ranks it started")
    _be_rank(job, environment, limit_s)


def launch_together(commands: Mapping[str, Callable[[], None]]) -> None:
    """Fork a process for each of several commands that call `launch`; return when all are done.

    Args:
        commands: by the names that failures of their processes have.

    Raises:
        RunFailed, UserError: of the first command that failed; no process of the others is left.
    """

    def call(command: Callable[[], None], folder: Path) -> None:
        command()

    works = {name: partial(call, command) for name, command in commands.items()}
    failure = _run_forked(works, math.inf)
    if failure is not None:
        raise failure.error()


def _launch_local(job: Job, limit_s: float | None, max_restarts: int) -> None:
    """Fork all ranks, again after a failure that may be transient."""
    deadline = math.inf if limit_s is None else time.monotonic() + limit_s
    works = {f"rank {rank}": partial(job.run_forked, rank) for rank in range(job.world_size)}
    for restart in range(1, max_restarts + 2):
        failure = _run_forked(works, deadline)
        if failure is None:
            return
        if failure.kind == "timeout":
            raise _timed_out(limit_s)
        if failure.kind not in ("crash", "memory") or restart > max_restarts:
            raise failure.error()
        say(f"restart {restart} of {max_restarts}: {failure.summary}")


def _run_forked(works: Mapping[str, Callable[[Path], None]], deadline: float) -> Failure | None:
    """Fork a process for each work; return the failure of the first that fails, and leave none.

    Args:
        works: called with a folder that all of them share.
    """
    with temporary("shardlab-ranks") as folder:
        arguments = ([*works.items()], folder, os.getpid())
        context = start_processes(_begin, arguments, len(works), join=False, start_method="fork")
        try:
            return _watch(dict(zip(works, context.processes, strict=True)), folder, deadline)
        finally:
            for process in context.processes:
                process.kill()
            for process in context.processes:
                process.join()


def _begin(
    number: int, works: list[tuple[str, Callable[[Path], None]]], folder: Path, parent: int
) -> None:
    """Do one of the works in its process, which ends with its parent; report an error in a file."""
    begin_fork(parent)
    name, work = works[number]
    try:
        work(folder)
    except BaseException as error:
        # complete before the connections of this process close, which lets others fail
        written = folder / f"{name}.partial"
        written.write_text(json.dumps(asdict(Failure.of(error, name))))
        written.rename(_report(folder, name))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a process group that failed may hang in its destructors


def _report(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _watch(processes: dict[str, BaseProcess], folder: Path, deadline: float) -> Failure | None:
    """Return None when all processes are done, else the cause of the first failure."""
    reports: dict[str, Failure] = {}

    def running() -> dict[int, str]:
        """Read the failures so far; return the names of the processes that go on, by sentinel."""
        codes = {name: process.exitcode for name, process in processes.items()}
        for name, code in codes.items():
            report = _report(folder, name)
            if report.exists():  # before the connections of its process close
                reports[name] = Failure(**json.loads(report.read_text()))
            elif code:
                reports[name] = _failure(name, code)
        return {processes[name].sentinel: name for name, code in codes.items() if code is None}

    while (alive := running()) and not reports:
        if time.monotonic() >= deadline:
            return Failure("timeout", "not done in time")
        wait(alive, None if deadline == math.inf else max(0.0, deadline - time.monotonic()))
    if not reports:
        return None
    # the cause may be a rank whose end the kernel has not shown yet
    waited = any(failure.waited for failure in reports.values())
    end = time.monotonic() + (_TIMEOUTS_S if waited else _END_S)
    while alive and all(failure.is_consequence for failure in reports.values()):
        if time.monotonic() >= end:
            break
        wait(alive, max(0.0, end - time.monotonic()))
        alive = running()
    return cause_of(reports | {name: None for name in alive.values() if name not in reports})


def _failure(name: str, code: int) -> Failure:
    """Return how a process ended that has reported nothing."""
    if code > 0:
        return Failure("crash", f"{name} ended with exit code {code}")
    killed = -code == signal.SIGKILL
    hint = ", out of memory?" if killed else ""
    summary = f"{name} was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
    return Failure("memory" if killed else "crash", summary)


def _be_rank(job: Job, environment: RankEnvironment, limit_s: float | None) -> None:
    """Run the rank of this process; after a failure agree with the others on who reports it."""
    die_with_parent(os.getppid())  # torchrun's agent may be killed without ending its processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # or the agent would wait for the interpreter
    if limit_s is not None:
        signal.signal(signal.SIGALRM, partial(_expire, limit_s))
        signal.setitimer(signal.ITIMER_REAL, limit_s)
    os.environ["LOCAL_RANK"] = str(environment.local_rank)
    os.environ["LOCAL_WORLD_SIZE"] = str(environment.local_world_size)
    store = _connect(environment, job.timeout)
    try:
        # torchrun's agent reads what `record` writes
        record(job.run)(environment.rank, store)
    except BaseException as error:
        name = f"rank {environment.rank}"
        failure = Failure.of(error, name)
        cause = _cause_of_all(failure, store, environment)
        if cause is not failure and cause.seconds != failure.seconds:
            say(f"{name} ends, too: {cause.summary}")
            raise SystemExit(1) from None
        raise cause.error() from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _connect(environment: RankEnvironment, timeout: timedelta) -> dist.Store:
    """Open the key-value store of torchrun's agent; without an agent, rank 0 hosts it."""
    hosts = environment.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    address, port = environment.master_addr, environment.master_port
    try:
        return dist.TCPStore(address, port, None, hosts, timeout, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise UserError(f"port {port} is in use: choose another in MASTER_PORT") from None


def _expire(limit_s: float, *_: Any) -> None:
    raise _timed_out(limit_s)


def _timed_out(limit_s: float | None) -> RunFailed:
    summary = f"not done after {limit_s:g} s"
    return RunFailed("timeout", summary, summary)


def _cause_of_all(failure: Failure, store: dist.Store, environment: RankEnvironment) -> Failure:
    """Exchange failures with the ranks of other processes, as far as they report one in time."""
    reports: dict[str, Failure | None] = {
        f"rank {rank}": None for rank in range(environment.world_size)
    }
    reporter = f"rank {environment.rank}"
    reports[reporter] = failure
    patience = _TIMEOUTS_S if failure.waited else _REPORTS_S
    end = time.monotonic() + patience
    with suppress(RuntimeError):  # the store has ended with its process
        if store.check(["attempt"]):  # not the failures of an earlier one
            store = dist.PrefixStore(store.get("attempt").decode(), store)
        store.set(f"failure of {reporter}", json.dumps(asdict(failure)))
        while failure.is_consequence and time.monotonic() < end:
            for name in [name for name, report in reports.items() if report is None]:
                if store.check([f"failure of {name}"]):
                    reports[name] = Failure(**json.loads(store.get(f"failure of {name}")))
            if not cause_of(reports).is_consequence:
                break
            time.sleep(0.05)
    return cause_of(reports)
