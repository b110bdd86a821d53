"""GPU, CPUs and NUMA memory of the process of a rank, and the backend that the GPUs allow."""

import ctypes
import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.experiment.affinity import CpuAffinity, format_cpus, parse_cpus
from shardlab.hardware.placement import Placement, RankLocation, place_here, placement_on
from shardlab.hardware.topology import SYSFS, node_of_pci, read_topology

# the kernel is asked directly: neither libnuma nor numactl has to be installed
_SET, _GET = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
}.get(platform.machine(), (None, None))
"""numbers of the system calls set_mempolicy and get_mempolicy"""
_PREFERRED = 1
_WORD = 64
_NODES = 1 << 12
"""more nodes than a kernel can be built for"""


def gpu_index(visible: int, *, forked: bool) -> int | None:
    """Return the index of the rank's own GPU among those that its process sees.

    Args:
        visible: GPUs that the process sees: those of the machine, or what a launcher left of them.
        forked: whether the other ranks of the machine see the same GPUs, as forks of one process.

    Returns:
        None when the ranks would have to share one.
    """
    if visible >= int(os.environ["LOCAL_WORLD_SIZE"]):
        return int(os.environ["LOCAL_RANK"])
    return 0 if visible and not forked else None


def take_gpu(*, forked: bool) -> str:
    """Make the rank's own GPU the current one, in the process of the rank.

    CUDA does not survive a fork.

    Returns:
        Its UUID; empty without its own GPU.
    """
    index = gpu_index(torch.cuda.device_count(), forked=forked)
    if index is None:
        return ""
    torch.cuda.set_device(index)
    return str(torch.cuda.get_device_properties(index).uuid)


def own_gpu(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Make the GPU of this rank the current one; all ranks of the group call together.

    Args:
        device: `cuda` for the GPU of LOCAL_RANK, unless the program has made another one current;
            with an index: that GPU.

    Returns:
        The device with its index.

    Raises:
        UserError: ranks share a GPU; on all of them.
    """
    index = device.index
    if index is None:
        index = torch.cuda.current_device()
        if index == 0 and {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
            index = gpu_index(torch.cuda.device_count(), forked=False) or 0
    torch.cuda.set_device(index)
    gpus = [""] * dist.get_world_size(group)
    uuid = torch.cuda.get_device_properties(index).uuid
    dist.all_gather_object(gpus, f"{platform.node()} {uuid}", group=group)
    for gpu in gpus:
        ranks = [rank for rank, each in enumerate(gpus) if each == gpu]
        if len(ranks) > 1:
            raise UserError(
                f"ranks {', '.join(map(str, ranks))} share GPU {gpu}: start one rank for each GPU, "
                "or call torch.cuda.set_device on each first"
            )
    return torch.device(device.type, index)


def gpu_node() -> int | None:
    """Return the NUMA node of the current GPU; None without one, or where sysfs has no node."""
    if not torch.cuda.is_initialized():
        return None
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return node_of_pci(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def backend_of(gpus: Sequence[str]) -> str:
    """Return NCCL, with gloo for host memory, if every rank has its own GPU; otherwise gloo.

    Args:
        gpus: UUIDs from `take_gpu`, of every rank.
    """
    own = all(gpus) and len(set(gpus)) == len(gpus)
    return "cpu:gloo,cuda:nccl" if own else "gloo"


def take_placement(way: CpuAffinity, rank: int, store: dist.Store, root: Path = SYSFS) -> None:
    """Bind this process, with all of its threads, to the CPUs that `way` gives it.

    To be called in the process of every rank, which has LOCAL_RANK, LOCAL_WORLD_SIZE and its GPU,
    but neither many threads nor much memory yet.

    Args:
        way: `train.placement`.
        store: of the ranks of this attempt alone: they exchange their locations in it.
        root: mount point of sysfs.

    Raises:
        UserError: `way` names CPUs that do not exist, or none for some rank.
    """
    if way == "none" or (way == "auto" and len(read_topology(root=root).nodes) == 1):
        return
    placement = _named(way, root) if isinstance(way, tuple) else _shared(rank, store, root)
    for task in Path("/proc/self/task").iterdir():  # CUDA has threads by now
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), placement.cpus)
    if placement.memory_node is not None:
        prefer_node(placement.memory_node)


def _named(lists: tuple[str | int, ...], root: Path) -> Placement:
    local_rank, count = _here()
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
            f"{format_cpus(missing)}: choose from {format_cpus(usable)}"
        )
    return placement_on(read_topology(usable, root), cpus)


def _shared(rank: int, store: dist.Store, root: Path) -> Placement:
    """Exchange the usable CPUs: torchrun, srun or the user may have bound ranks already."""
    local_rank, count = _here()
    store.set(f"cpus/{rank}", json.dumps(asdict(RankLocation.here(gpu_node()))))
    first = rank - local_rank
    locations = [json.loads(store.get(f"cpus/{first + other}")) for other in range(count)]
    return place_here([RankLocation(**each) for each in locations], root)[local_rank]


def _here() -> tuple[int, int]:
    """Return the local rank and the number of local ranks."""
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def prefer_node(node: int) -> bool:
    """Prefer this NUMA node for memory of this thread and those that it starts (set_mempolicy(2)).

    Returns:
        Whether the kernel does so. A container may forbid the call: then memory comes from the node
        of the CPU that touches it first.
    """
    if _SET is None:
        return False
    nodes = (ctypes.c_ulong * (_NODES // _WORD))()
    nodes[node // _WORD] = 1 << node % _WORD
    # the kernel reads one bit less than maxnode says
    status: int = ctypes.CDLL(None).syscall(_SET, _PREFERRED, nodes, ctypes.c_ulong(_NODES + 1))
    return status == 0


def policy_nodes() -> tuple[int, ...]:
    """Return the nodes in the policy of this thread (get_mempolicy(2)); none without a policy."""
    nodes = (ctypes.c_ulong * (_NODES // _WORD))()
    none, flags = ctypes.c_void_p(), ctypes.c_ulong(0)
    size = ctypes.c_ulong(_NODES + 1)
    if _GET is None or ctypes.CDLL(None).syscall(_GET, none, nodes, size, none, flags) != 0:
        return ()
    return tuple(node for node in range(_NODES) if nodes[node // _WORD] >> node % _WORD & 1)
