"""Assignment of CPUs and NUMA memory nodes to the ranks of a machine.

The ranks of a machine are dealt to its NUMA nodes, by their GPU where they have one. Those that may
use the same CPUs share them out by whole physical cores, neighbours together, and by single CPUs
where cores are too few. Where CPUs are too few as well, they share all of them. Ranks that own
different CPUs already, as torchrun's --numa-binding=exclusive or srun give them, keep theirs.
"""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from shardlab.engines.cpu_topology import SYSFS, Core, Topology, read_topology


@dataclass(frozen=True)
class Placement:
    """CPUs and memory node of one rank."""

    cores: tuple[Core, ...]
    """one or more; the first is for control"""
    memory_node: int | None
    """preferred NUMA node of its memory; None where there is no choice"""

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
    """Assign CPUs and memory nodes to all ranks of a machine; a pure function of its arguments.

    Ranks with one affinity mask get CPUs of their own if it has one for each, unless their GPUs
    call more of them to a node than it has CPUs.

    Args:
        topology: with all CPUs of the ranks.
        ranks: of this machine, by local rank.
    """
    nodes = _nodes(topology, ranks)
    owners: dict[int, tuple[int, ...]] = {
        cpu: tuple(r for r, each in enumerate(ranks) if cpu in each.cpus and core.node in nodes[r])
        for core in topology.cores
        for cpu in core.cpus
    }
    cpus: list[set[int]] = [set() for _ in ranks]
    for together in dict.fromkeys(filter(None, owners.values())):
        common = topology.cores_of({cpu for cpu in owners if owners[cpu] == together})
        for rank, part in zip(together, _parts(common, len(together)), strict=True):
            cpus[rank].update(part)
    return [placement_on(topology, each, cpus[:rank].count(each)) for rank, each in enumerate(cpus)]


def place_here(ranks: Sequence[RankLocation], root: Path = SYSFS) -> list[Placement]:
    """Return `place_ranks` for this machine, or the one whose sysfs is at `root`."""
    return place_ranks(read_topology({cpu for each in ranks for cpu in each.cpus}, root), ranks)


def placement_on(topology: Topology, cpus: Collection[int], turn: int = 0) -> Placement:
    """Return the placement of a rank that gets these CPUs, one or more of `topology`.

    Args:
        turn: how many ranks before it have got the same; each takes another core for control.
    """
    cores = topology.cores_of(cpus)
    turn %= len(cores)
    nodes = {core.node for core in cores}
    choice = len(nodes) == 1 < len(topology.memory_nodes) and nodes <= topology.memory_nodes
    return Placement(cores[turn:] + cores[:turn], cores[0].node if choice else None)


def _nodes(topology: Topology, ranks: Sequence[RankLocation]) -> list[set[int]]:
    """Return the NUMA nodes from which each rank gets CPUs."""
    nodes: list[set[int]] = []
    masks = [frozenset(each.cpus) for each in ranks]
    counts: dict[frozenset[int], Counter[int]] = {mask: Counter() for mask in masks}
    for rank, mask in enumerate(masks):
        size = Counter(core.node for core in topology.cores_of(mask) for _ in core.cpus)
        gpu_node, alike = ranks[rank].gpu_node, masks.count(mask)
        if gpu_node is not None and gpu_node in size:
            nodes.append({gpu_node})
        elif alike < len(size):
            nodes.append(set(sorted(size)[masks[:rank].count(mask) :: alike]))
        else:
            # highest averages: round-robin over nodes of equal size, more ranks on larger ones
            count = counts[mask]
            best = max(size, key=lambda node: (size[node] / (count[node] + 1), -node))
            count[best] += 1
            nodes.append({best})
    return nodes


def _parts(cores: Sequence[Core], count: int) -> list[set[int]]:
    """Split cores between `count` ranks equally, else CPUs, else give all CPUs to each."""
    for units in ([core.cpus for core in cores], [(cpu,) for core in cores for cpu in core.cpus]):
        if (size := len(units)) >= count:
            bounds = [size * i // count for i in range(count + 1)]
            slices = (units[a:b] for a, b in pairwise(bounds))
            return [{cpu for unit in part for cpu in unit} for part in slices]
    return [{cpu for core in cores for cpu in core.cpus}] * count
