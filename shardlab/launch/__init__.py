"""Starts the ranks of a run, here and on other nodes, and never leaves one behind."""

import os
import time
from contextlib import closing
from datetime import timedelta

from shardlab.core.errors import UserError
from shardlab.core.process import die_with_parent
from shardlab.core.progress import say
from shardlab.experiment.affinity import CpuAffinity
from shardlab.launch.failure import Failure, RunFailed
from shardlab.launch.leader import Leader
from shardlab.launch.local import LocalRanks
from shardlab.launch.member import Member
from shardlab.launch.peers import Alone, Peers
from shardlab.launch.place import Place, Start, find_place
from shardlab.launch.rank import Interfaces, Job, Worker
from shardlab.launch.torchrun import Torchrun

__all__ = ["Interfaces", "RunFailed", "Start", "Worker", "launch"]


def launch(
    worker: Worker,
    world_size: int,
    threads: int,
    timeout_s: float,
    limit_s: float | None = None,
    links: Interfaces | None = None,
    start: Start | None = None,
    placement: CpuAffinity = "auto",
) -> None:
    """Runs `worker` on every rank and returns when all are done.

    The ranks are forked from this process, after its imports: starting one takes milliseconds
    instead of seconds. Under torchrun, in a step of SLURM and with `start.nnodes` several commands
    start an equal share each. LOCAL_RANK and LOCAL_WORLD_SIZE tell a rank its place on its machine.

    Ranks of which every one has a GPU of its own use NCCL, and gloo for what lies in host memory;
    otherwise all use gloo.

    Args:
        world_size: ranks of all commands together.
        threads: CPU threads per rank.
        timeout_s: longest wait for another rank in one collective, and for another command.
        limit_s: longest duration of the whole run.
        links: the ranks talk over these instead of the loopback interface.
        placement: which CPUs and memory the ranks get.

    Raises:
        RunFailed: a rank failed, with the error of the rank that failed first, or time ran out.
        UserError: raised by the worker; or commands and ranks that do not fit together; or links
            with several commands; or a placement on CPUs that are not there.
    """
    start = start or Start()
    place = find_place(world_size, start)
    if links is not None and place != Place():
        raise UserError(
            "ranks of torchrun, srun or other nodes are where they are: emulate links without them"
        )
    with closing(_find_peers(place, world_size, timeout_s, start.max_restarts)) as peers:
        timeout = timedelta(seconds=timeout_s)
        job = Job(worker, world_size, threads, timeout, links, place, peers, os.getpid(), placement)
        _attempts(job, limit_s, start.max_restarts)


def _find_peers(place: Place, world_size: int, timeout_s: float, restarts: int) -> Peers:
    if place.called == "rank of torchrun":
        die_with_parent(os.getppid())
        return Torchrun(place)
    if place.commands == 1:
        return Alone(restarts)
    if place.command == 0:
        return Leader(place, world_size, timeout_s, restarts)
    return Member(place, world_size, timeout_s, restarts)


def _attempts(job: Job, limit_s: float | None, restarts: int) -> None:
    deadline = None if limit_s is None else time.monotonic() + limit_s
    restart = 0
    while True:
        failure, again = job.peers.settle(_attempt(job, deadline, limit_s))
        if failure is None:
            return
        if not again:
            raise failure.error()
        restart += 1
        say(f"restart {restart} of {restarts}: {failure.summary}")


def _attempt(job: Job, deadline: float | None, limit_s: float | None) -> Failure | None:
    job.peers.begin()
    with LocalRanks(job.ranks, job.run) as ranks:
        job.peers.serve()
        try:
            return ranks.watch(job.peers, deadline)
        except TimeoutError:
            return Failure("timeout", f"not done after {limit_s:g} s")
