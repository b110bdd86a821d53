"""Laws of the assignment of CPUs and memory nodes to ranks, on generated machines."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardlab.config.affinity import CpuAffinity, format_cpus
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.engines.cpu_placement import Placement, RankLocation, place_here
from tests.engines.machine_factory import TWO_SOCKETS, Machine, machines

RANKS = st.integers(1, 9)


def place(machine: Machine, ranks: list[RankLocation]) -> list[Placement]:
    with TemporaryDirectory() as folder:
        machine.write(Path(folder))
        return place_here(ranks, Path(folder))


def node_of(machine: Machine, cpu: int) -> int:
    return next(n for n in machine.nodes for core in machine.nodes[n] if cpu in core)


def masks(machine: Machine) -> st.SearchStrategy[list[int]]:
    return st.sets(st.sampled_from(machine.cpus), min_size=1).map(sorted)


@given(machines(), st.data())
def test_every_rank_gets_usable_cpus_for_control_and_workers(
    machine: Machine, data: st.DataObject
) -> None:
    nodes = st.none() | st.sampled_from([*machine.nodes, 99])
    residents = st.builds(RankLocation, masks(machine), nodes)
    ranks = data.draw(st.lists(residents, min_size=1, max_size=9))
    placed = place(machine, ranks)
    assert len(placed) == len(ranks)
    for rank, got in zip(ranks, placed, strict=True):
        assert got.control and got.workers
        assert {*got.control, *got.workers} <= set(got.cpus) <= set(rank.cpus)
        assert len(got.cpus) == 1 or not {*got.control} & {*got.workers}
        near = {node_of(machine, cpu) for cpu in rank.cpus}
        if rank.gpu_node in near:
            assert {node_of(machine, cpu) for cpu in got.cpus} == {rank.gpu_node}
        if got.memory_node is not None:
            assert {node_of(machine, cpu) for cpu in got.cpus} == {got.memory_node}
            assert got.memory_node not in machine.without_memory
    assert place(machine, ranks) == placed


@given(machines(), RANKS, st.data())
def test_ranks_of_one_mask_get_disjoint_cpus(
    machine: Machine, count: int, data: st.DataObject
) -> None:
    mask = data.draw(masks(machine))
    placed = place(machine, [RankLocation(mask)] * count)
    cpus = [cpu for got in placed for cpu in got.cpus]
    nodes = {node_of(machine, cpu) for cpu in mask}
    if len(mask) >= count:
        assert len(set(cpus)) == len(cpus)
    elif len(nodes) == 1:
        assert all(list(got.cpus) == mask for got in placed)
    if count < len(nodes):
        assert sorted(cpus) == mask
    else:
        assert all(len({node_of(machine, cpu) for cpu in got.cpus}) == 1 for got in placed)


@given(machines(), RANKS)
def test_a_core_is_split_only_where_cores_are_fewer_than_ranks(
    machine: Machine, count: int
) -> None:
    placed = place(machine, [RankLocation(machine.cpus)] * count)
    for node in machine.nodes:
        here = [got for got in placed if {node_of(machine, cpu) for cpu in got.cpus} == {node}]
        cores = machine.cores(node)
        if here and len(cores) >= len(here):
            assert sorted(len(got.cores) for got in here) == sorted(
                len(cores) * (i + 1) // len(here) - len(cores) * i // len(here)
                for i in range(len(here))
            )
            assert all(list(core.cpus) in cores for got in here for core in got.cores)


@given(machines(), RANKS, st.data())
def test_bound_ranks_keep_their_cpus(machine: Machine, count: int, data: st.DataObject) -> None:
    assume(len(machine.cpus) >= count)
    owner = {cpu: data.draw(st.integers(0, count - 1)) for cpu in machine.cpus}
    own = [sorted(cpu for cpu in owner if owner[cpu] == rank) for rank in range(count)]
    assume(all(own))
    placed = place(machine, [RankLocation(cpus) for cpus in own])
    assert [list(got.cpus) for got in placed] == own


@given(machines(), RANKS)
def test_placement_is_idempotent(machine: Machine, count: int) -> None:
    assume(len(machine.cpus) >= count)
    once = place(machine, [RankLocation(machine.cpus)] * count)
    assert place(machine, [RankLocation(got.cpus) for got in once]) == once


def described(placed: list[Placement]) -> list[str]:
    return [
        f"{format_cpus(got.control)} | {format_cpus(got.workers)} | {got.memory_node}"
        for got in placed
    ]


ONE_NODE = Machine({0: [[0], [1], [2], [3]]})
UNEVEN = Machine({0: [[0], [1], [2], [3], [4]], 2: [[6]], 5: []})


@pytest.mark.parametrize(
    ("machine", "ranks", "expected"),
    [
        (TWO_SOCKETS, 1, ["0,8 | 1-7 | None"]),
        (TWO_SOCKETS, 2, ["0,8 | 1-3 | 0", "4,12 | 5-7 | 1"]),
        (TWO_SOCKETS, 4, ["0,8 | 1 | 0", "4,12 | 5 | 1", "2,10 | 3 | 0", "6,14 | 7 | 1"]),
        (ONE_NODE, 1, ["0 | 1-3 | None"]),
        (ONE_NODE, 2, ["0 | 1 | None", "2 | 3 | None"]),
        (Machine({0: [[0], [1]]}), 3, ["0 | 1 | None", "1 | 0 | None", "0 | 1 | None"]),
        (UNEVEN, 3, ["0 | 0 | 0", "1 | 2 | 0", "3 | 4 | 0"]),
        (UNEVEN, 6, [*(f"{cpu} | {cpu} | 0" for cpu in range(5)), "6 | 6 | 2"]),
        (Machine({0: [[0, 1]]}), 1, ["0 | 1 | None"]),
        (Machine({0: [[0, 1]]}), 2, ["0 | 0 | None", "1 | 1 | None"]),
        (Machine({0: [[0]]}), 2, ["0 | 0 | None"] * 2),
    ],
)
def test_placement_on_typical_machines(machine: Machine, ranks: int, expected: list[str]) -> None:
    assert described(place(machine, [RankLocation(machine.cpus)] * ranks)) == expected


def test_gpu_locality_precedes_balance() -> None:
    gpus = [1, 1, 0, None]
    placed = place(TWO_SOCKETS, [RankLocation(TWO_SOCKETS.cpus, node) for node in gpus])
    assert [got.memory_node for got in placed] == [1, 1, 0, 0]
    crowded = place(Machine({0: [[0]], 1: [[1], [2]]}), [RankLocation([0, 1, 2], 0)] * 2)
    assert [got.cpus for got in crowded] == [(0,), (0,)]


@pytest.mark.parametrize("value", ["auto", "cores", "none", ["0-3,8", 4], ["0"]])
def test_placement_policies_are_accepted(value: object) -> None:
    expected = tuple(value) if isinstance(value, list) else value
    assert validate(CpuAffinity, value, "train.placement") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("node", "expected auto, cores, none or CPUs for each rank"),
        (True, "expected auto, cores, none or CPUs for each rank"),
        (None, "expected auto"),
        (["0-3", "4-"], "list of CPUs '4-'"),
        ([-1], "list of CPUs '-1'"),
        ([["0"]], "list of CPUs"),
    ],
)
def test_invalid_placement_policies_are_refused_in_one_line(value: object, message: str) -> None:
    with pytest.raises(UserError, match=rf"^train\.placement: {message}[^\n]*$"):
        validate(CpuAffinity, value, "train.placement")
