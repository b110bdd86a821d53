"""CPUs and NUMA memory of the process of a rank."""

import ctypes
import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.config.affinity import CpuAffinity, format_cpus, parse_cpus
from shardlab.core.errors import UserError
from shardlab.engines.cpu_placement import Placement, RankLocation, place_here, placement_on
from shardlab.engines.cpu_topology import SYSFS, node_of_pci, read_topology

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


def gpu_node() -> int | None:
    """Return the NUMA node of the current GPU; None without one, or where sysfs has no node."""
    if not torch.cuda.is_initialized():
        return None
    gpu: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return node_of_pci(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


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
