"""Factory of machines, written as trees like those of sysfs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from shardlab.config.affinity import format_cpus


@dataclass(frozen=True)
class Machine:
    nodes: Mapping[int, list[list[int]]]
    """by number: the CPUs of each physical core; none for a node that is memory alone"""
    offline: Collection[int] = ()
    without_memory: Collection[int] = ()
    gpus: Mapping[str, int] = field(default_factory=dict)
    """by PCI address: the node, or -1 as the kernel says where it does not know"""
    old: bool = False
    """a kernel before 5.3"""

    def cores(self, node: int) -> list[list[int]]:
        """Those that are online."""
        online = [[cpu for cpu in core if cpu not in self.offline] for core in self.nodes[node]]
        return [core for core in online if core]

    @property
    def cpus(self) -> list[int]:
        """Those that are online."""
        return sorted(cpu for node in self.nodes for core in self.cores(node) for cpu in core)

    def write(self, root: Path) -> None:
        files = {"cpu/online": format_cpus(self.cpus), "cpu/possible": "0-4095"}
        for node in self.nodes:
            here = [cpu for core in self.cores(node) for cpu in core]
            files[f"node/node{node}/cpulist"] = format_cpus(here)
            for core in self.cores(node):
                for cpu in core:
                    name = "thread_siblings_list" if self.old else "core_cpus_list"
                    files[f"cpu/cpu{cpu}/topology/{name}"] = format_cpus(core)
        for cpu in self.offline:
            files[f"cpu/cpu{cpu}/online"] = "0"
        files["node/has_memory"] = format_cpus(set(self.nodes) - set(self.without_memory))
        for name, text in files.items():
            path = root / "devices/system" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        for address, node in self.gpus.items():
            path = root / "bus/pci/devices" / address / "numa_node"
            path.parent.mkdir(parents=True)
            path.write_text(f"{node}\n")


TWO_SOCKETS = Machine(
    {0: [[0, 8], [1, 9], [2, 10], [3, 11]], 1: [[4, 12], [5, 13], [6, 14], [7, 15]]}
)
"""with SMT, numbered as usual: the second threads after all first ones"""


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    numbers = draw(st.lists(st.integers(0, 70), min_size=1, max_size=4, unique=True))
    threads = draw(st.sampled_from([1, 1, 2, 4]))
    sizes = [draw(st.integers(0, 5)) for _ in numbers]
    sizes[0] = max(1, sizes[0])
    count = threads * sum(sizes)
    # numbers with holes, in any order
    cpus = draw(
        st.permutations(sorted(draw(st.sets(st.integers(0, 300), min_size=count, max_size=count))))
    )
    cores = [sorted(cpus[i : i + threads]) for i in range(0, count, threads)]
    nodes = {n: [cores.pop() for _ in range(size)] for n, size in zip(numbers, sizes, strict=True)}
    offline = draw(st.sets(st.sampled_from(cpus), max_size=count - 1))
    without = draw(st.sets(st.sampled_from(numbers), max_size=1))
    return Machine(nodes, offline, without, old=draw(st.booleans()))
