"""Process of one rank: rendezvous, device, placement, process group, and the report of an error."""

import faulthandler
import json
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardlab.config.affinity import CpuAffinity
from shardlab.core.errors import StorageError, UserError
from shardlab.core.gpus import RankGpu, backend_of, take_gpu, why_on_cpu
from shardlab.core.process import begin_fork
from shardlab.core.progress import say
from shardlab.train.allocator import keep_freed_memory
from shardlab.train.rank_failure import TIMED_OUT, UNKNOWN_ORDER, Failure
from shardlab.train.rank_placement import take_placement
from shardlab.train.stores import Attempt

_STDERR = 2
_POLL_S = 0.02
"""a blocking wait of the store with a short time-out would write warnings"""


class Rendezvous(NamedTuple):
    """Name, store and backend that all ranks of an attempt have agreed on."""

    name: str
    store: dist.Store
    """with the name as prefix: of the ranks of this attempt alone"""
    backend: str


def rendezvous(
    store: dist.Store, rank: int, world_size: int, gpu: RankGpu | None, timeout: timedelta
) -> Rendezvous:
    """Wait for all ranks of this attempt.

    The store of torchrun's agent outlives a restart, TORCHELASTIC_RESTART_COUNT may differ between
    nodes, and gloo would connect to the addresses of processes that are gone. So rank 0 publishes a
    new name for each attempt and lists the tokens of the ranks that joined it. A rank that finds
    the name of an earlier attempt is not in its list, and looks again.

    Args:
        gpu: the rank's own, if it has one.

    Raises:
        TimeoutError: names the ranks that did not join.
        UserError: see `backend_of`.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        return _open(store, world_size, gpu, deadline)
    name, token = "", uuid.uuid4().hex
    while True:
        if store.check(["attempt"]) and (latest := store.get("attempt").decode()) != name:
            name = latest
            own = dist.PrefixStore(name, store)
            own.set(str(rank), json.dumps([token, gpu]))
        if name and own.check(["begin"]):
            tokens, backend = json.loads(own.get("begin"))
            if tokens[rank - 1] == token:
                return Rendezvous(name, own, backend)
        _sleep(deadline, f"rank {rank} found no rendezvous of rank 0")


def _open(store: dist.Store, world_size: int, gpu: RankGpu | None, deadline: float) -> Rendezvous:
    name = uuid.uuid4().hex
    own = dist.PrefixStore(name, store)
    store.set("attempt", name)
    ranks = [str(rank) for rank in range(1, world_size)]
    while missing := [rank for rank in ranks if not own.check([rank])]:
        _sleep(deadline, f"rank {', '.join(missing)} did not join")
    joined = [json.loads(own.get(rank)) for rank in ranks]
    backend = backend_of([gpu, *(None if each is None else RankGpu(*each) for _, each in joined)])
    own.set("begin", json.dumps([[token for token, _ in joined], backend]))
    return Rendezvous(name, own, backend)


def _sleep(deadline: float, problem: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{problem} within the time-out")
    time.sleep(_POLL_S)


_DISCONNECTED = ("Connection closed by peer", "Connection reset by peer")
"""gloo's messages about a rank whose process ended"""

Worker = Callable[[dist.ProcessGroup], None]


class Interfaces(Protocol):
    """Network interfaces of the ranks: `shardlab.comm.emulated_link.Links`, for one."""

    def enter(self, rank: int) -> str:
        """Move the process of the rank to its interface; return the name of the interface."""

    def is_cut(self) -> bool:
        """Return whether the rank of this process is unreachable; called after `enter`."""


@dataclass(frozen=True)
class Job:
    """Settings that all ranks of a run share."""

    worker: Worker
    world_size: int
    threads: int
    timeout: timedelta
    links: Interfaces | None
    placement: CpuAffinity
    parent: int
    """process id of the command that forks the ranks"""

    def run(self, rank: int, attempt: Attempt, pipe: Connection) -> None:
        """Run the worker as `rank`; send the name of the attempt, then any failure, to `pipe`."""
        begin_fork(self.parent)
        # where Python was when its memory, or that of a library, was damaged: nothing else tells
        faulthandler.enable(_STDERR)
        keep_freed_memory()
        joined = None
        try:
            joined = self._join(rank, attempt)
            pipe.send_bytes(json.dumps({"attempt": joined.name}).encode())
            take_placement(self.placement, rank, joined.store)
            self._work(rank, joined, attempt.interface)
        except BaseException as error:
            failure = _report(error, rank, joined, self.links)
            pipe.send_bytes(json.dumps(asdict(failure)).encode())
            sys.stdout.flush()
            sys.stderr.flush()
            # a process group that failed may hang in its destructors
            os._exit(1)

    def _join(self, rank: int, attempt: Attempt) -> Rendezvous:
        local_rank, local_world_size, forked = rank, self.world_size, True
        if attempt.environment is not None:
            local_rank = attempt.environment.local_rank
            local_world_size = attempt.environment.local_world_size
            forked = False
        os.environ["LOCAL_RANK"] = str(local_rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(local_world_size)
        torch.set_num_threads(self.threads)
        store = attempt.connect(self.timeout)
        gpu = take_gpu(forked=forked)
        joined = rendezvous(store, rank, self.world_size, gpu, self.timeout)
        if rank == 0 and joined.backend == "gloo" and (why := why_on_cpu(self.world_size)):
            say(why)
        return joined

    def _work(self, rank: int, joined: Rendezvous, interface: str | None) -> None:
        if self.links is not None:
            if joined.backend != "gloo":
                raise UserError("emulated links are for gloo, and GPUs use NCCL: remove the link")
            os.environ["GLOO_SOCKET_IFNAME"] = self.links.enter(rank)
        elif interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # torch gives every other group half an hour, those of device meshes too
        dist.distributed_c10d.default_pg_timeout = self.timeout
        dist.distributed_c10d.default_pg_nccl_timeout = self.timeout
        dist.init_process_group(
            joined.backend,
            store=joined.store,
            rank=rank,
            world_size=self.world_size,
            timeout=self.timeout,
        )
        group = dist.group.WORLD
        assert group is not None
        # a rank that is done at once must not leave while others are connecting to it
        dist.barrier()
        self.worker(group)
        dist.destroy_process_group()


def _report(
    error: BaseException, rank: int, joined: Rendezvous | None, links: Interfaces | None
) -> Failure:
    """Return the failure of this rank, numbered in the order of failures.

    The number is taken while the sockets of this rank are open: no other rank has failed because of
    this one.
    """
    order, name = UNKNOWN_ORDER, ""
    if joined is not None:
        name = joined.name
        with suppress(RuntimeError):  # the store may have ended with its process
            order = joined.store.add("failures", 1)
    if isinstance(error, UserError):
        kind: Literal["user", "storage"] = "storage" if isinstance(error, StorageError) else "user"
        return Failure(kind, str(error), order=order, attempt=name)
    line = traceback.format_exception_only(error)[0].splitlines()[0]
    if joined is not None and links is not None and links.is_cut():
        return Failure("crash", f"rank {rank}: its link is cut: {line}", attempt=name)
    return Failure(
        "memory" if isinstance(error, MemoryError) else "crash",
        f"rank {rank}: {line}",
        f"rank {rank}: {''.join(traceback.format_exception(error)).strip()}",
        order,
        name,
        waited=TIMED_OUT in line,
        disconnected=any(message in line for message in _DISCONNECTED),
    )
