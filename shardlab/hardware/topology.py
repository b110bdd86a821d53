"""The processors of a machine as Linux shows them: CPUs, physical cores and NUMA nodes.

A CPU is what a thread runs on; several are one physical core where it has SMT. A NUMA node is a
part of the memory with the CPUs that are close to it.
"""

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from shardlab.core.cpu_sets import parse_cpus

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Core:
    """A physical core, as far as it may be used."""

    cpus: tuple[int, ...]
    """one or more, ascending"""
    node: int
    """its NUMA node"""


@dataclass(frozen=True)
class Topology:
    """The CPUs that may be used, and where they are."""

    cores: tuple[Core, ...]
    """by node and first CPU"""
    memory_nodes: frozenset[int] = frozenset()
    """NUMA nodes with memory, also those without a usable CPU"""

    def cores_of(self, cpus: Collection[int]) -> tuple[Core, ...]:
        """The cores as far as they consist of `cpus`."""
        parts = ((tuple(cpu for cpu in core.cpus if cpu in cpus), core) for core in self.cores)
        return tuple(Core(part, core.node) for part, core in parts if part)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Those with usable CPUs, ascending."""
        return tuple(sorted({core.node for core in self.cores}))


def read_topology(allowed: Collection[int] | None = None, root: Path = SYSFS) -> Topology:
    """From sysfs (the kernel's Documentation/ABI/stable/sysfs-devices-node, -system-cpu).

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
    # a kernel without NUMA has no nodes; what the machine has then is one
    elsewhere = min(node_of.values(), default=0)
    cores: dict[tuple[int, ...], list[int]] = {}
    for cpu in sorted(allowed):
        cores.setdefault(_siblings(folder / f"cpu/cpu{cpu}/topology", cpu), []).append(cpu)
    found = [Core(tuple(cpus), node_of.get(cpus[0], elsewhere)) for cpus in cores.values()]
    found.sort(key=lambda core: (core.node, core.cpus))
    return Topology(tuple(found), frozenset(_cpus_in(folder / "node/has_memory")))


def node_of_pci(address: str, root: Path = SYSFS) -> int | None:
    """The NUMA node that a device is close to; None where the machine does not say.

    Args:
        address: on the PCI bus, such as 0000:3b:00.0.
    """
    try:
        node = int((root / "bus/pci/devices" / address.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _siblings(folder: Path, cpu: int) -> tuple[int, ...]:
    """The CPUs of the same physical core."""
    # kernels before 5.3 know the second name only
    return (
        _cpus_in(folder / "core_cpus_list") or _cpus_in(folder / "thread_siblings_list") or (cpu,)
    )


def _cpus_in(path: Path) -> tuple[int, ...]:
    """Numbers in a file of the kernel; none where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return ()
    return parse_cpus(text) if text else ()
