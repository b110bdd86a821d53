"""Start of the ranks of a run: forked here, or one rank for each process of torchrun or srun."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

from shardlab.config.affinity import CpuAffinity
from shardlab.core.errors import UserError
from shardlab.core.process import begin_fork, die_with_parent
from shardlab.core.progress import say
from shardlab.train.launch_environment import RankEnvironment, rank_environment
from shardlab.train.local_ranks import Limit, Processes
from shardlab.train.rank import Interfaces, Job, Worker
from shardlab.train.rank_failure import Failure, RunFailed
from shardlab.train.stores import Attempt, FileAttempt, TcpAttempt

__all__ = ["Interfaces", "RunFailed", "Worker", "launch", "launch_together"]


def launch(
    worker: Worker,
    world_size: int,
    threads: int,
    timeout_s: float,
    limit_s: float | None = None,
    links: Interfaces | None = None,
    max_restarts: int = 0,
    placement: CpuAffinity = "auto",
) -> None:
    """Run `worker` on every rank and return when all are done.

    The ranks are forked from this process, after its imports: starting one takes milliseconds
    instead of seconds. A process that torchrun or srun started is one rank, and forks that one
    alone. LOCAL_RANK and LOCAL_WORLD_SIZE locate a rank on its machine.

    If every rank has its own GPU, they use NCCL, and gloo for tensors in host memory; otherwise all
    use gloo.

    Args:
        world_size: number of ranks, on all nodes.
        threads: CPU threads per rank.
        timeout_s: longest wait for another rank, in the rendezvous and in each collective.
        limit_s: longest duration of the whole run.
        links: emulated links that the ranks use instead of the loopback interface.
        max_restarts: how often new ranks are started after a rank crashed or was killed.
        placement: which CPUs and memory the ranks get.

    Raises:
        RunFailed: a rank failed, with the error of the rank that failed first, or time ran out.
        UserError: raised by the worker; or the environment of torchrun or srun does not fit
            `world_size`, `links` or `max_restarts`; or `placement` names CPUs that do not exist.
        SystemExit: this process is one rank of torchrun or srun, and another reports the failure.
    """
    if max_restarts < 0:
        raise UserError(f"--max-restarts {max_restarts}: expected 0 or more")
    timeout = timedelta(seconds=timeout_s)
    job = Job(worker, world_size, threads, timeout, links, placement, parent=os.getpid())
    limit = Limit(limit_s)
    environment = rank_environment(world_size)
    if environment is None:
        _launch_local(job, limit, max_restarts)
        return
    if links is not None:
        raise UserError(
            "links are emulated between the ranks of one command: start it without torchrun or srun"
        )
    if max_restarts:
        raise UserError("--max-restarts: give it to torchrun, which restarts the ranks it started")
    _launch_one(job, environment, limit)


def launch_together(commands: Mapping[str, Callable[[], None]]) -> None:
    """Fork a process for each of several commands that call `launch`; return when all are done.

    Args:
        commands: by the names that failures of their processes have.

    Raises:
        RunFailed, UserError: of the first command that failed; no process of the others is left.
    """
    works = {name: partial(_report_failure, os.getpid(), each) for name, each in commands.items()}
    with Processes(works) as processes:
        failure = processes.watch(Limit(None), lambda attempt: False)
    if failure is not None:
        raise failure.error()


def _report_failure(parent: int, command: Callable[[], None], pipe: Connection) -> None:
    begin_fork(parent)
    try:
        command()
    except (RunFailed, UserError) as error:
        pipe.send_bytes(json.dumps(asdict(Failure.of(error))).encode())
        sys.exit(1)


def _launch_local(job: Job, limit: Limit, max_restarts: int) -> None:
    """Fork all ranks, again after a failure that may be transient."""
    for restart in range(1, max_restarts + 2):
        with FileAttempt() as attempt:
            failure = _run(job, range(job.world_size), attempt, limit)
        if failure is None:
            return
        if not failure.transient or restart > max_restarts:
            raise failure.error()
        say(f"restart {restart} of {max_restarts}: {failure.summary}")


def _launch_one(job: Job, environment: RankEnvironment, limit: Limit) -> None:
    """Fork the one rank of this process, and agree with the others on who reports a failure."""
    die_with_parent(os.getppid())  # torchrun's agent may be killed without ending its processes
    with TcpAttempt(environment) as attempt:
        failure = _run(job, [environment.rank], attempt, limit)
        if failure is not None:
            raise attempt.reported(failure)


def _run(job: Job, ranks: Sequence[int], attempt: Attempt, limit: Limit) -> Failure | None:
    works = {f"rank {rank}": partial(job.run, rank, attempt) for rank in ranks}
    with Processes(works) as processes:
        attempt.serve()  # not before the fork: the server is a thread
        return processes.watch(limit, attempt.failed_elsewhere)
