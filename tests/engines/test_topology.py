"""CPU topology read from sysfs, on generated machines and on this one."""

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.config.affinity import format_cpus, parse_cpus
from shardlab.core.errors import UserError
from shardlab.engines.cpu_topology import (
    Core,
    Topology,
    node_of_pci,
    read_topology,
)
from tests.engines.machine_factory import TWO_SOCKETS, Machine, machines


def read(machine: Machine, allowed: set[int] | None = None) -> Topology:
    with TemporaryDirectory() as folder:
        machine.write(Path(folder))
        return read_topology(allowed, Path(folder))


def parts(topology: Topology) -> dict[int, set[tuple[int, ...]]]:
    return {n: {c.cpus for c in topology.cores if c.node == n} for n in topology.nodes}


@given(machines(), st.data())
def test_cores_and_nodes_are_those_of_the_machine_as_far_as_they_may_be_used(
    machine: Machine, data: st.DataObject
) -> None:
    allowed = data.draw(st.none() | st.sets(st.sampled_from(machine.cpus), min_size=1))
    usable = set(machine.cpus) if allowed is None else allowed
    expected = {
        node: {tuple(cpu for cpu in core if cpu in usable) for core in machine.cores(node)} - {()}
        for node in machine.nodes
    }
    topology = read(machine, allowed)
    assert parts(topology) == {node: cores for node, cores in expected.items() if cores}
    assert topology.memory_nodes == set(machine.nodes) - set(machine.without_memory)
    assert list(topology.cores) == sorted(topology.cores, key=lambda core: (core.node, core.cpus))


def test_without_sysfs_there_is_one_node_of_single_cpus(tmp_path: Path) -> None:
    expected = tuple(Core((cpu,), 0) for cpu in (0, 2, 5))
    assert read_topology({0, 2, 5}, tmp_path) == Topology(expected)
    assert {cpu for core in read_topology(None, tmp_path).cores for cpu in core.cpus} == (
        os.sched_getaffinity(0)
    )


def test_unassigned_cpus_belong_to_the_first_node(tmp_path: Path) -> None:
    TWO_SOCKETS.write(tmp_path)
    (tmp_path / "devices/system/node/node1/cpulist").write_text("4-6,12-14\n")
    assert [core.node for core in read_topology({0, 4, 7, 15}, tmp_path).cores] == [0, 0, 1]


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="no lscpu to compare with")
def test_topology_of_this_machine_matches_lscpu() -> None:
    lscpu = subprocess.run(
        ["lscpu", "-p=CPU,CORE,NODE"], capture_output=True, text=True, check=True
    )
    lines = [line.split(",") for line in lscpu.stdout.splitlines() if not line.startswith("#")]
    cores: dict[tuple[str, str], set[int]] = {}
    for cpu, core, node in lines:
        cores.setdefault((core, node), set()).add(int(cpu))
    expected = {(frozenset(cpus), int(node or 0)) for (_, node), cpus in cores.items()}
    assert {(frozenset(core.cpus), core.node) for core in read_topology().cores} == expected


@pytest.mark.parametrize(
    ("address", "node"),
    [("0000:3b:00.0", 1), ("0000:3B:00.0", 1), ("0000:5e:00.0", None), ("0000:00:1f.0", None)],
)
def test_numa_node_of_a_pci_device(tmp_path: Path, address: str, node: int | None) -> None:
    Machine({0: [[0]]}, gpus={"0000:3b:00.0": 1, "0000:5e:00.0": -1}).write(tmp_path)
    assert node_of_pci(address, tmp_path) == node


@given(st.sets(st.integers(0, 999_999), min_size=1))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_cpus(cpus)) == tuple(sorted(cpus))


def test_cpu_lists_have_the_format_of_the_kernel() -> None:
    assert format_cpus([9, 0, 1, 2, 8, 5]) == "0-2,5,8-9"
    assert parse_cpus(" 8, 0-2,1 ") == (0, 1, 2, 8)


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "-1", "0,,1", "1.5", "0-3:2", "٣"])
def test_invalid_cpu_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^list of CPUs '.*': write numbers and ranges, such as"):
        parse_cpus(text)
