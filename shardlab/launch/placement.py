"""CPU affinity and memory policy of the process of a rank."""

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from shardlab.core.cpu_sets import format_cpus, parse_cpus
from shardlab.core.errors import UserError
from shardlab.experiment.affinity import CpuAffinity
from shardlab.hardware.memory_policy import prefer_node
from shardlab.hardware.placement import Placement, RankLocation, place_here, placement_on
from shardlab.hardware.topology import SYSFS, read_topology
from shardlab.launch.devices import gpu_node


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
