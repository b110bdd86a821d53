"""A rank: its process group, its device and CPUs, and its errors."""

import ctypes
import faulthandler
import json
import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links, Loopback
from shardlab.core.cpu_affinity import CpuAffinity, parse_cpus
from shardlab.core.errors import RunFailed, UserError
from shardlab.core.gpus import RankGpu, backend_of, take_gpu, why_on_cpu
from shardlab.core.progress import say
from shardlab.core.ranges import format_ranges
from shardlab.kernels.cpu_placement import RankLocation, node_of_pci, place_here, read_topology


def failure_of(error: BaseException, where: str) -> UserError | RunFailed:
    """Return an error of a rank as `launch` raises it.

    Args:
        where: name of the rank.
    """
    if isinstance(error, UserError | RunFailed):
        return error
    line = traceback.format_exception_only(error)[0].splitlines()[0]
    text = "".join(traceback.format_exception(error)).strip()
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    kind: Literal["memory", "crash"] = "memory" if memory else "crash"
    failure = RunFailed(kind, f"{where}: {text}", f"{where}: {line}")
    # the traceback of the rank that is the cause says why
    return RunFailed(kind, failure.summary, failure.summary) if failure.is_consequence else failure


Worker = Callable[[dist.ProcessGroup], None]

_STDERR = 2
_POLL_S = 0.02
"""a blocking wait of the store with a short time-out would write warnings"""


@dataclass(frozen=True)
class LaunchConfig:
    """Settings that all ranks of a run share."""

    worker: Worker
    world_size: int
    threads: int
    timeout: timedelta
    links: Links | Loopback | None
    placement: CpuAffinity

    def run_forked(self, rank: int, store: Path) -> None:
        """Run the worker as a rank of one command, whose ranks share the file of a store."""
        os.environ["LOCAL_RANK"] = str(rank)
        os.environ["LOCAL_WORLD_SIZE"] = str(self.world_size)
        # gloo would look the host name up, which may not resolve
        interface = "lo" if self.links is None else None
        self.run(rank, dist.FileStore(str(store)), interface, forked=True)

    def run(
        self, rank: int, store: dist.Store, interface: str | None = None, *, forked: bool = False
    ) -> None:
        """Run the worker as `rank`, in a process with LOCAL_RANK and LOCAL_WORLD_SIZE.

        Args:
            interface: network interface for gloo; None: as gloo, the user or `links` choose.
            forked: whether the ranks of this machine are forks of one process.
        """
        # where Python was when its memory, or that of a library, was damaged
        faulthandler.enable(_STDERR)
        keep_freed_memory()
        torch.set_num_threads(self.threads)
        gpu = take_gpu(forked=forked)
        facts = {"gpu": gpu, "location": asdict(RankLocation.here(gpu_node()))}
        store, ranks = exchange(store, rank, self.world_size, facts, self.timeout)
        backend = backend_of([facts["gpu"] and RankGpu(*facts["gpu"]) for facts in ranks])
        if rank == 0 and backend == "gloo" and (why := why_on_cpu(self.world_size)):
            say(why)
        first = rank - int(os.environ["LOCAL_RANK"])
        local = ranks[first : first + int(os.environ["LOCAL_WORLD_SIZE"])]
        bind_cpus(self.placement, [RankLocation(**facts["location"]) for facts in local])
        if self.links is not None:
            if backend != "gloo":
                raise UserError("emulated links are for gloo, and GPUs use NCCL: remove the link")
            os.environ["GLOO_SOCKET_IFNAME"] = self.links.enter(rank)
        elif interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        # torch gives every other group half an hour, those of device meshes too
        dist.distributed_c10d.default_pg_timeout = self.timeout
        dist.distributed_c10d.default_pg_nccl_timeout = self.timeout
        with _named_interface():
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=self.world_size, timeout=self.timeout
            )
        group = dist.group.WORLD
        assert group is not None
        # a rank that is done at once must not leave while others are connecting to it
        dist.barrier()
        self.worker(group)
        dist.destroy_process_group()


@contextmanager
def _named_interface() -> Iterator[None]:
    """Turn gloo's error about a network interface into one line."""
    try:
        yield
    except RuntimeError as error:
        wanted = os.environ.get("GLOO_SOCKET_IFNAME")
        if wanted is None or "Unable to find address" not in str(error):
            raise
        present = ", ".join(name for _, name in socket.if_nameindex())
        raise UserError(
            f"GLOO_SOCKET_IFNAME is {wanted!r}: name a network interface that has an address, "
            f"of {present}; patterns and addresses are not understood"
        ) from None


def exchange(
    store: dist.Store, rank: int, world_size: int, value: Any, timeout: timedelta
) -> tuple[dist.Store, list[Any]]:
    """Exchange JSON values between all ranks, before there is a process group.

    The store of torchrun's agent outlives a restart, TORCHELASTIC_RESTART_COUNT may differ between
    nodes, and gloo would connect to the addresses of processes that are gone. So rank 0 names each
    attempt, and lists the ranks that joined it; one that has joined an earlier attempt is not among
    them, and joins again.

    Returns:
        a store for the ranks of this attempt alone, and their values.

    Raises:
        TimeoutError: names the ranks that did not join.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    token = uuid.uuid4().hex
    message = json.dumps([token, value])
    if rank == 0:
        attempt = dist.PrefixStore(token, store)
        attempt.set("rank 0", message)
        store.set("attempt", token)
        names = [f"rank {other}" for other in range(world_size)]
        while missing := [name for name in names if not attempt.check([name])]:
            _wait(deadline, missing)
        joined = [json.loads(attempt.get(name)) for name in names]
        attempt.set("joined", json.dumps(joined))
        return attempt, [value for _, value in joined]
    name = ""
    while True:
        if store.check(["attempt"]) and (latest := store.get("attempt").decode()) != name:
            name = latest
            attempt = dist.PrefixStore(name, store)
            attempt.set(f"rank {rank}", message)
        if name and attempt.check(["joined"]):
            joined = json.loads(attempt.get("joined"))
            if joined[rank][0] == token:
                return attempt, [value for _, value in joined]
        _wait(deadline, ["rank 0"])


def _wait(deadline: float, missing: list[str]) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{', '.join(missing)} did not join within the time-out")
    time.sleep(_POLL_S)


def gpu_node() -> int | None:
    """Return the NUMA node of the current GPU; None without one, or where sysfs has no node."""
    if not torch.cuda.is_initialized():
        return None
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return node_of_pci(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def bind_cpus(way: CpuAffinity, ranks: list[RankLocation]) -> None:
    """Bind this process, with all of its threads, to the CPUs that `way` gives it.

    Args:
        way: `train.placement`.
        ranks: of this machine, by local rank.

    Raises:
        UserError: `way` names CPUs that do not exist, or none for some rank.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    if way == "none" or (way == "auto" and len(read_topology().nodes) == 1):
        return
    if isinstance(way, tuple):
        cpus = _named(way, local_rank, len(ranks))
    else:
        cpus = place_here(ranks)[local_rank].cpus
    for task in Path("/proc/self/task").iterdir():  # CUDA has threads by now
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cpus)


def _named(lists: tuple[str | int, ...], local_rank: int, count: int) -> tuple[int, ...]:
    if len(lists) < count:
        raise UserError(
            f"train.placement: CPUs for {len(lists)} of the {count} ranks of this machine: name "
            "some for each"
        )
    usable = os.sched_getaffinity(0)
    cpus = parse_cpus(str(lists[local_rank]))
    if missing := set(cpus) - usable:
        raise UserError(
            f"train.placement.{local_rank}: rank {local_rank} of this machine may not use CPU "
            f"{format_ranges(missing)}: choose from {format_ranges(usable)}"
        )
    return cpus


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""parameters of mallopt(3)"""
_LARGEST_IN_HEAP = 32 << 20
"""bytes: the limit up to which glibc adapts its thresholds to what a process frees"""
_KEPT = 1 << 30


def keep_freed_memory() -> None:
    """Let malloc keep freed memory of blocks up to 32 MiB, 1 GiB at most.

    By default glibc gives memory back to the kernel beyond thresholds that follow the largest block
    freed so far: some ranks of a run fault in thousands of pages in every step and others none, by
    the order of what they freed. A forked process does not read the variables that set this. On a
    GPU PyTorch's caching allocator does the same. Without glibc nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, _KEPT)
