"""CPU topology read from sysfs, and laws of the assignment of CPUs to ranks."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.core.cpu_affinity import CpuAffinity, parse_cpus
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.ranges import format_ranges
from shardlab.kernels.cpu_placement import (
    Core,
    Placement,
    RankLocation,
    Topology,
    node_of_pci,
    place_ranks,
    read_topology,
)

RANKS = st.integers(1, 9)


def machine(*nodes: list[tuple[int, ...]]) -> Topology:
    """A machine of the given physical cores, by node."""
    cores = (Core(node, cpus) for node, inside in enumerate(nodes) for cpus in inside)
    return Topology(tuple(cores), frozenset(range(len(nodes))))


# with SMT, numbered as usual: the second threads after all first ones
TWO_SOCKETS = machine([(0, 8), (1, 9), (2, 10), (3, 11)], [(4, 12), (5, 13), (6, 14), (7, 15)])


@st.composite
def machines(draw: st.DrawFn) -> Topology:
    threads = draw(st.sampled_from([1, 2, 4]))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    cpus = iter(draw(st.permutations(range(threads * sum(sizes)))))
    return machine(
        *([tuple(sorted(next(cpus) for _ in range(threads))) for _ in range(n)] for n in sizes)
    )


def cpus_of(topology: Topology) -> list[int]:
    return sorted(cpu for core in topology.cores for cpu in core.cpus)


def nodes_of(placement: Placement) -> set[int]:
    return {core.node for core in placement.cores}


@given(machines(), RANKS, st.data())
def test_every_rank_gets_cpus_near_its_gpu_for_control_and_workers(topology, count, data):
    gpus = st.none() | st.sampled_from([*topology.nodes, 99])
    ranks = [RankLocation(cpus_of(topology), data.draw(gpus)) for _ in range(count)]
    for rank, placed in zip(ranks, place_ranks(topology, ranks), strict=True):
        assert {*placed.control, *placed.workers} <= {*placed.cpus} <= {*rank.cpus}
        assert placed.control and placed.workers
        assert len(placed.cpus) == 1 or not {*placed.control} & {*placed.workers}
        assert rank.gpu_node not in topology.nodes or nodes_of(placed) == {rank.gpu_node}


@given(machines(), RANKS)
def test_ranks_share_out_all_cpus_of_their_nodes(topology, count):
    usable = cpus_of(topology)
    placed = place_ranks(topology, [RankLocation(usable)] * count)
    cpus = [cpu for placement in placed for cpu in placement.cpus]
    if len(usable) >= count:
        assert len({*cpus}) == len(cpus)
        again = place_ranks(topology, [RankLocation(placement.cpus) for placement in placed])
        assert again == placed or count == 1
    if count < len(topology.nodes):
        assert sorted(cpus) == usable
    else:
        assert all(len(nodes_of(placement)) == 1 for placement in placed)


@pytest.mark.parametrize(
    ("topology", "count", "expected"),
    [
        (TWO_SOCKETS, 1, ["0,8 | 1-7"]),
        (TWO_SOCKETS, 2, ["0,8 | 1-3", "4,12 | 5-7"]),
        (TWO_SOCKETS, 4, ["0,8 | 1", "4,12 | 5", "2,10 | 3", "6,14 | 7"]),
        (machine([(0,), (1,), (2,), (3,)]), 2, ["0 | 1", "2 | 3"]),
        (machine([(0,), (1,)]), 3, ["0 | 1", "1 | 0", "0 | 1"]),
        (machine([(0,), (1,), (2,), (3,)], [(4,)]), 5, [f"{n} | {n}" for n in range(5)]),
        (machine([(0, 1)]), 2, ["0 | 0", "1 | 1"]),
        (machine([(0,)]), 2, ["0 | 0"] * 2),
    ],
)
def test_placement_on_typical_machines(topology, count, expected):
    placed = place_ranks(topology, [RankLocation(cpus_of(topology))] * count)
    shown = [
        f"{format_ranges(placement.control)} | {format_ranges(placement.workers)}"
        for placement in placed
    ]
    assert sorted(shown) == sorted(expected)


def test_bound_ranks_keep_their_cpus():
    placed = place_ranks(TWO_SOCKETS, [RankLocation([0, 1]), RankLocation([4, 12, 13])])
    assert [placement.cpus for placement in placed] == [(0, 1), (4, 12, 13)]


def test_topology_is_read_from_sysfs(tmp_path: Path):
    files = {
        "node/node0/cpulist": "0,2",
        "node/node3/cpulist": "1,3",
        "node/has_memory": "0,3-4",
        **{f"cpu/cpu{n}/topology/thread_siblings_list": f"{n % 2},{n % 2 + 2}" for n in range(4)},
    }
    for name, text in files.items():
        path = tmp_path / "devices/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    topology = read_topology({0, 1, 2}, tmp_path)
    assert topology == Topology((Core(0, (0, 2)), Core(3, (1,))), frozenset({0, 3, 4}))
    assert read_topology({0, 5}, tmp_path / "none").cores == (Core(0, (0,)), Core(0, (5,)))
    assert set(cpus_of(read_topology())) >= os.sched_getaffinity(0)


@pytest.mark.parametrize(("text", "node"), [("1", 1), ("-1", None), (None, None)])
def test_numa_node_of_a_pci_device(tmp_path: Path, text: str | None, node: int | None):
    path = tmp_path / "bus/pci/devices/0000:3b:00.0/numa_node"
    path.parent.mkdir(parents=True)
    if text is not None:
        path.write_text(text)
    assert node_of_pci("0000:3B:00.0", tmp_path) == node


@given(st.sets(st.integers(0, 999_999), min_size=1))
def test_cpu_lists_round_trip(cpus: set[int]) -> None:
    assert parse_cpus(format_ranges(cpus)) == tuple(sorted(cpus))


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-", "0,,1"])
def test_invalid_cpu_list_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^list of CPUs '.*': write numbers and ranges, such as"):
        parse_cpus(text)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("node", "expected auto, cores, none or CPUs for each rank"),
        (["0-3", "4-"], "list of CPUs '4-'"),
    ],
)
def test_invalid_placement_policies_are_refused_in_one_line(value: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.placement: {message}[^\n]*$"):
        validate(CpuAffinity, value, "train.placement")
