"""CPUs of the ranks of a machine, by its physical cores and NUMA nodes.

Ranks with the same affinity mask divide its CPUs: each gets complete cores of one NUMA node, the
node of its GPU if it has one. Memory comes from the node of the CPU that touches it first. Ranks
that a launcher has bound, such as torchrun's --numa-binding or srun's --cpu-bind, keep their CPUs.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from shardlab.core.cpu_affinity import parse_cpus

SYSFS = Path("/sys")


class Core(NamedTuple):
    """Usable CPUs of a physical core; a core with SMT has several."""

    node: int
    """NUMA node of the core."""
    cpus: tuple[int, ...]
    """One or more CPUs, ascending."""


@dataclass(frozen=True)
class Topology:
    """Usable CPUs and NUMA nodes of a machine."""

    cores: tuple[Core, ...]
    """Cores, sorted by node and first CPU."""
    memory_nodes: frozenset[int] = frozenset()
    """NUMA nodes with memory, also nodes without a usable CPU."""

    def cores_of(self, cpus: Collection[int]) -> tuple[Core, ...]:
        """Return the cores that have a CPU in `cpus`, without their other CPUs."""
        parts = (
            Core(core.node, tuple(cpu for cpu in core.cpus if cpu in cpus)) for core in self.cores
        )
        return tuple(core for core in parts if core.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes with usable CPUs, ascending."""
        return tuple(sorted({core.node for core in self.cores}))


def read_topology(allowed: Collection[int] | None = None, root: Path = SYSFS) -> Topology:
    """Read the topology from sysfs (Documentation/ABI/stable/sysfs-devices-node, -system-cpu).

    Args:
        allowed: Usable CPUs, all online; None: all CPUs that are online.
        root: Mount point of sysfs.
    """
    folder = root / "devices/system"
    if allowed is None:
        allowed = _read_cpus(folder / "cpu/online") or os.sched_getaffinity(0)
    node_of = {
        cpu: int(path.name.removeprefix("node"))
        for path in (folder / "node").glob("node[0-9]*")
        for cpu in _read_cpus(path / "cpulist")
    }
    # a kernel without NUMA lists no nodes; the machine then counts as one
    default = min(node_of.values(), default=0)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        siblings = _read_cpus(folder / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or (cpu,), []).append(cpu)
    sorted_cores = sorted(
        Core(node_of.get(cpus[0], default), tuple(cpus)) for cpus in cores.values()
    )
    return Topology(tuple(sorted_cores), frozenset(_read_cpus(folder / "node/has_memory")))


def node_of_pci(address: str, root: Path = SYSFS) -> int | None:
    """Return the NUMA node of a device, or None if the machine does not report it.

    Args:
        address: Address on the PCI bus, such as 0000:3b:00.0.
    """
    try:
        node = int((root / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_cpus(path: Path) -> tuple[int, ...]:
    """Return the CPUs in a file of the kernel; empty if the file is missing."""
    text = path.read_text().strip() if path.is_file() else ""
    return parse_cpus(text) if text else ()


@dataclass(frozen=True)
class Placement:
    """CPUs of one rank."""

    cores: tuple[Core, ...]
    """One or more cores; the first is for control."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def control(self) -> tuple[int, ...]:
        """CPUs of the first core, for the training thread, copies and messages.

        A rank with one core uses its first CPU.
        """
        first = self.cores[0].cpus
        return first if len(self.cores) > 1 else first[:1]

    @property
    def workers(self) -> tuple[int, ...]:
        """One CPU of each core that is not for control, for threads limited by memory bandwidth.

        A rank with one core uses its other CPUs, and a rank with one CPU uses this CPU.
        """
        if len(self.cores) > 1:
            return tuple(core.cpus[0] for core in self.cores[1:])
        return self.cores[0].cpus[1:] or self.cores[0].cpus


@dataclass(frozen=True)
class RankLocation:
    """CPUs that a rank may use, and the NUMA node of its GPU; can be serialized as JSON."""

    cpus: Sequence[int]
    """Affinity mask: one or more CPUs, ascending."""
    gpu_node: int | None = None
    """NUMA node of the GPU; None without a GPU, or if the machine does not report it."""

    @classmethod
    def here(cls, gpu_node: int | None) -> Self:
        """Return the location of the calling thread."""
        return cls(sorted(os.sched_getaffinity(0)), gpu_node)


def place_ranks(topology: Topology, ranks: Sequence[RankLocation]) -> list[Placement]:
    """Assign CPUs to all ranks of a machine; a pure function of its arguments.

    Ranks with the same affinity mask are assigned to its NUMA nodes round-robin, or to the nodes of
    their GPUs. The ranks of a node divide its cores into consecutive parts. If there are fewer
    cores than ranks, they divide the CPUs. If there are also fewer CPUs, each rank gets all of
    them.

    Args:
        topology: Topology with all CPUs of the ranks.
        ranks: Ranks of this machine, by local rank.
    """
    if len({tuple(rank.cpus) for rank in ranks}) > 1:  # a launcher has bound them
        return [Placement(topology.cores_of(rank.cpus)) for rank in ranks]
    usable = topology.cores_of(ranks[0].cpus)
    size = Counter(core.node for core in usable for _ in core.cpus)
    nodes = sorted(size)
    nodes_of: list[list[int]] = []
    for index, rank in enumerate(ranks):
        if rank.gpu_node in nodes:
            nodes_of.append([rank.gpu_node])
        elif len(ranks) < len(nodes):
            nodes_of.append(nodes[index :: len(ranks)])
        else:  # highest averages: round-robin over nodes of equal size, more ranks on larger ones
            nodes_of.append(
                [max(nodes, key=lambda node: size[node] / (nodes_of.count([node]) + 1))]
            )
    placements = []
    for index, rank_nodes in enumerate(nodes_of):
        cores = tuple(core for core in usable if core.node in rank_nodes)
        sharing = nodes_of.count(rank_nodes)
        placements.append(_part(cores, nodes_of[:index].count(rank_nodes), sharing))
    return placements


def place_here(ranks: Sequence[RankLocation], root: Path = SYSFS) -> list[Placement]:
    """Return `place_ranks` for this machine, or the one whose sysfs is at `root`."""
    return place_ranks(read_topology({cpu for rank in ranks for cpu in rank.cpus}, root), ranks)


def _part(cores: tuple[Core, ...], index: int, count: int) -> Placement:
    """Return the placement of rank `index` of `count` ranks that share these cores."""
    for units in ([core.cpus for core in cores], [(cpu,) for core in cores for cpu in core.cpus]):
        size = len(units)
        if size >= count:
            chosen = units[size * index // count : size * (index + 1) // count]
            return Placement(Topology(cores).cores_of({cpu for unit in chosen for cpu in unit}))
    first = index % len(cores)  # the ranks take different cores for control
    return Placement(cores[first:] + cores[:first])
