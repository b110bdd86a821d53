"""What the process of one rank does."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Protocol

import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.process import die_with_parent
from shardlab.experiment.affinity import CpuAffinity
from shardlab.launch.devices import take_gpu
from shardlab.launch.failure import UNKNOWN_ORDER, Failure
from shardlab.launch.meeting import Meeting, meet
from shardlab.launch.peers import Peers
from shardlab.launch.place import Place
from shardlab.launch.placement import take_placement

_TIMED_OUT = "Timed out waiting"
"""what gloo says of a rank that neither answers nor closes its connection"""

Worker = Callable[[dist.ProcessGroup], None]


class Interfaces(Protocol):
    """Where ranks open their sockets: `shardlab.transport.link_emulation.Links`, for one."""

    def enter(self, rank: int) -> str:
        """Called by the process of the rank; returns the name of its network interface."""

    def is_cut(self) -> bool:
        """Whether nothing reaches the rank in whose process this is called, after `enter`."""


@dataclass(frozen=True)
class Job:
    """What is the same for all ranks of a command."""

    worker: Worker
    world_size: int
    threads: int
    timeout: timedelta
    links: Interfaces | None
    place: Place
    peers: Peers
    parent: int
    """process id of the command"""
    placement: CpuAffinity = "auto"

    @property
    def ranks(self) -> range:
        """Those that the command starts."""
        count = self.world_size // self.place.commands
        return range(self.place.command * count, (self.place.command + 1) * count)

    def run(self, rank: int, pipe: Connection) -> None:
        """Runs the worker as `rank`; says over `pipe` where the ranks met, and what went wrong."""
        die_with_parent(self.parent)
        # the command's own handlers are not for ranks; Ctrl-C reaches the command as well
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        meeting = None
        try:
            meeting = self._meet(rank)
            pipe.send_bytes(json.dumps({"meeting": meeting.name}).encode())
            take_placement(self.placement, rank, meeting.store)
            self._work(rank, meeting)
        except BaseException as error:
            failure = _account(error, rank, meeting, self.links)
            pipe.send_bytes(json.dumps(asdict(failure)).encode())
            sys.stdout.flush()
            sys.stderr.flush()
            # a process group that failed may hang in its destructors
            os._exit(1)

    def _meet(self, rank: int) -> Meeting:
        place, here = self.place, len(self.ranks)
        index = rank - self.ranks.start
        os.environ["LOCAL_RANK"] = str(place.command_here * here + index)
        os.environ["LOCAL_WORLD_SIZE"] = str(place.commands_here * here)
        torch.set_num_threads(self.threads)
        store = self.peers.connect(self.timeout)
        gpu = take_gpu(here, index)
        return meet(store, rank, self.world_size, gpu, self.timeout)

    def _work(self, rank: int, meeting: Meeting) -> None:
        if self.links is not None:
            if meeting.backend != "gloo":
                raise UserError("emulated links are for gloo, and GPUs use NCCL: remove the link")
            os.environ["GLOO_SOCKET_IFNAME"] = self.links.enter(rank)
        elif self.peers.interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", self.peers.interface)
        # torch gives every other group half an hour, those of device meshes too
        dist.distributed_c10d.default_pg_timeout = self.timeout
        dist.distributed_c10d.default_pg_nccl_timeout = self.timeout
        dist.init_process_group(
            meeting.backend,
            store=meeting.store,
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


def _account(
    error: BaseException, rank: int, meeting: Meeting | None, links: Interfaces | None
) -> Failure:
    """With its number, while this rank's sockets are open: nobody else has failed because of it."""
    order, name = UNKNOWN_ORDER, ""
    if meeting is not None:
        name = meeting.name
        with suppress(RuntimeError):  # the store may have ended with its process
            order = meeting.store.add("failures", 1)
    if isinstance(error, UserError):
        return Failure("user", str(error), order=order, meeting=name)
    line = traceback.format_exception_only(error)[0].splitlines()[0]
    if meeting is not None and links is not None and links.is_cut():
        return Failure("crash", f"rank {rank}: its link is cut: {line}", meeting=name)
    return Failure(
        "memory" if isinstance(error, MemoryError) else "crash",
        f"rank {rank}: {line}",
        f"rank {rank}: {''.join(traceback.format_exception(error)).strip()}",
        order,
        name,
        waited=_TIMED_OUT in line,
    )
