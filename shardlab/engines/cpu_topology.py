"""CPU topology as Linux shows it: CPUs, physical cores and NUMA nodes.

A CPU is what a thread runs on; several are one physical core where it has SMT. A NUMA node is a
part of the memory with the CPUs that are close to it.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shardlab.config.affinity import parse_cpus

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Core:
    """The usable CPUs of a physical core."""

    cpus: tuple[int, ...]
    """one or more, ascending"""
    node: int
    """its NUMA node"""


@dataclass(frozen=True)
class Topology:
    """The usable CPUs, and the NUMA nodes."""

    cores: tuple[Core, ...]
    """by node and first CPU"""
    memory_nodes: frozenset[int] = frozenset()
    """NUMA nodes with memory, also those without a usable CPU"""

    def cores_of(self, cpus: Collection[int]) -> tuple[Core, ...]:
        """Return the cores, restricted to `cpus`."""
        parts = ((tuple(cpu for cpu in core.cpus if cpu in cpus), core) for core in self.cores)
        return tuple(Core(part, core.node) for part, core in parts if part)

    @property
    def nodes(self) -> tuple[int, ...]:
        """NUMA nodes with usable CPUs, ascending."""
        return tuple(sorted({core.node for core in self.cores}))


def read_topology(allowed: Collection[int] | None = None, root: Path = SYSFS) -> Topology:
    """Read the topology from sysfs (Documentation/ABI/stable/sysfs-devices-node, -system-cpu).

    Args:
        allowed: CPUs that may be used, all of them online, as those of an affinity mask are; None:
            all that are online.
        root: where sysfs is.
    """
    folder = root / "devices/system"
    if allowed is None:
        allowed = _cpus_in(folder / "cpu/online") or os.sched_getaffinity(0)
    node_of = {
        cpu: int(path.name.removeprefix("node"))
        for path in (folder / "node").glob("node[0-9]*")
        for cpu in _cpus_in(path / "cpulist")
    }
    # a kernel without NUMA lists no nodes; the machine then counts as one
    elsewhere = min(node_of.values(), default=0)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        cores.setdefault(_siblings(folder / f"cpu/cpu{cpu}/topology", cpu), []).append(cpu)
    found = [Core(tuple(cpus), node_of.get(cpus[0], elsewhere)) for cpus in cores.values()]
    found.sort(key=lambda core: (core.node, core.cpus))
    return Topology(tuple(found), frozenset(_cpus_in(folder / "node/has_memory")))


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


def _siblings(folder: Path, cpu: int) -> tuple[int, ...]:
    """Return the CPUs of the same physical core."""
    # kernels before 5.3 know the second name only
    return (
        _cpus_in(folder / "core_cpus_list") or _cpus_in(folder / "thread_siblings_list") or (cpu,)
    )


def _cpus_in(path: Path) -> tuple[int, ...]:
    """Read a CPU list of the kernel; empty where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ()
    return parse_cpus(text) if text else ()
