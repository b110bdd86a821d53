"""CPUs of the ranks of a machine, by its physical cores and NUMA nodes.

Ranks that may use the same CPUs share them out: each gets whole cores of one NUMA node, that of its
GPU where it has one. Memory comes from the node of the CPU that touches it first. Ranks that a
launcher has bound already, such as torchrun's --numa-binding or srun's --cpu-bind, keep their CPUs.
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
    """The usable CPUs of a physical core: several where it has SMT."""

    node: int
    """its NUMA node"""
    cpus: tuple[int, ...]
    """one or more, ascending"""


@dataclass(frozen=True)
class Topology:
    """The usable CPUs, and the NUMA nodes."""

    cores: tuple[Core, ...]
    """by node and first CPU"""
    memory_nodes: frozenset[int] = frozenset()
    """NUMA nodes with memory, also those without a usable CPU"""

    def cores_of(self, cpus: Collection[int]) -> tuple[Core, ...]:
        """Return the cores, restricted to `cpus`."""
        parts = (Core(node, tuple(cpu for cpu in all_ if cpu in cpus)) for node, all_ in self.cores)
        return tuple(core for core in parts if core.cpus)

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes with usable CPUs, ascending."""
        return tuple(sorted({core.node for core in self.cores}))


def read_topology(allowed: Collection[int] | None = None, root: Path = SYSFS) -> Topology:
    """Read the topology from sysfs (Documentation/ABI/stable/sysfs-devices-node, -system-cpu).

    Args:
        allowed: CPUs that may be used, all of them online; None: all that are online.
        root: mount point of sysfs.
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
    known = sorted(Core(node_of.get(cpus[0], default), tuple(cpus)) for cpus in cores.values())
    return Topology(tuple(known), frozenset(_read_cpus(folder / "node/has_memory")))


def node_of_pci(address: str, root: Path = SYSFS) -> int | None:
    """Return the NUMA node of a device; None where the machine does not report it.

    Args:
        address: on the PCI bus, such as 0000:3b:00.0.
    """
    try:
        node = int((root / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _read_cpus(path: Path) -> tuple[int, ...]:
    """Read a CPU list of the kernel; empty where there is no such file."""
    text = path.read_text().strip() if path.is_file() else ""
    return parse_cpus(text) if text else ()


@dataclass(frozen=True)
class Placement:
    """CPUs of one rank."""

    cores: tuple[Core, ...]
    """one or more; the first is for control"""

    @property
    def cpus(self) -> tuple[int, ...]:
        """All CPUs, ascending."""
        return tuple(sorted(cpu for core in self.cores for cpu in core.cpus))

    @property
    def control(self) -> tuple[int, ...]:
        """CPUs of the first core, for the training thread, copies and messages.

        Of a rank with one core: its first CPU.
        """
        first = self.cores[0].cpus
        return first if len(self.cores) > 1 else first[:1]

    @property
    def workers(self) -> tuple[int, ...]:
        """One CPU of each core that is not for control, for threads limited by memory bandwidth.

        Of a rank with one core: its other CPUs; with one CPU: that one.
        """
        if len(self.cores) > 1:
            return tuple(core.cpus[0] for core in self.cores[1:])
        return self.cores[0].cpus[1:] or self.cores[0].cpus


@dataclass(frozen=True)
class RankLocation:
    """CPUs that a rank may use, and the NUMA node of its GPU; serialises as JSON."""

    cpus: Sequence[int]
    """affinity mask, one or more CPUs, ascending"""
    gpu_node: int | None = None
    """NUMA node of its GPU; None without a GPU, or where the machine does not report it"""

    @classmethod
    def here(cls, gpu_node: int | None) -> Self:
        """Return the location of the calling thread."""
        return cls(sorted(os.sched_getaffinity(0)), gpu_node)


def place_ranks(topology: Topology, ranks: Sequence[RankLocation]) -> list[Placement]:
    """Assign CPUs to all ranks of a machine; a pure function of its arguments.

    Ranks with one affinity mask are dealt to its NUMA nodes round-robin, or by their GPUs. Those of
    a node share its cores out, neighbours together; its single CPUs where cores are too few; all of
    them where CPUs are too few as well.

    Args:
        topology: with all CPUs of the ranks.
        ranks: of this machine, by local rank.
    """
    if len({tuple(rank.cpus) for rank in ranks}) > 1:  # a launcher has bound them
        return [Placement(topology.cores_of(rank.cpus)) for rank in ranks]
    usable = topology.cores_of(ranks[0].cpus)
    size = Counter(core.node for core in usable for _ in core.cpus)
    nodes = sorted(size)
    wanted: list[list[int]] = []
    for number, rank in enumerate(ranks):
        if rank.gpu_node in nodes:
            wanted.append([rank.gpu_node])
        elif len(ranks) < len(nodes):
            wanted.append(nodes[number :: len(ranks)])
        else:  # highest averages: round-robin over nodes of equal size, more ranks on larger ones
            wanted.append([max(nodes, key=lambda node: size[node] / (wanted.count([node]) + 1))])
    placed = []
    for number, mine in enumerate(wanted):
        cores = tuple(core for core in usable if core.node in mine)
        placed.append(_part(cores, wanted[:number].count(mine), wanted.count(mine)))
    return placed


def place_here(ranks: Sequence[RankLocation], root: Path = SYSFS) -> list[Placement]:
    """Return `place_ranks` for this machine, or the one whose sysfs is at `root`."""
    return place_ranks(read_topology({cpu for rank in ranks for cpu in rank.cpus}, root), ranks)


def _part(cores: tuple[Core, ...], index: int, count: int) -> Placement:
    """Return the part of one of `count` ranks that share these cores."""
    for units in ([core.cpus for core in cores], [(cpu,) for core in cores for cpu in core.cpus]):
        size = len(units)
        if size >= count:
            chosen = units[size * index // count : size * (index + 1) // count]
            return Placement(Topology(cores).cores_of({cpu for unit in chosen for cpu in unit}))
    turn = index % len(cores)  # each rank takes another core for control
    return Placement(cores[turn:] + cores[:turn])
