"""CPUs and memory of real ranks, which report their affinity from inside."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardlab.train.run  # noqa: F401 - imported once, before the commands are forked
from shardlab.config.affinity import CpuAffinity
from shardlab.core.errors import UserError
from shardlab.engines.cpu_topology import read_topology
from shardlab.train.launch import launch
from shardlab.train.rank_placement import policy_nodes, prefer_node, take_placement
from tests.commands import ROOT, Command, forked, torchrun, typed
from tests.ranks import run_ranks
from tests.train.workers import writes_affinity

USABLE = sorted(os.sched_getaffinity(0))
SEVERAL_CPUS = pytest.mark.skipif(len(USABLE) < 2, reason="one CPU cannot be shared out")
ONE_NODE = pytest.mark.skipif(len(read_topology().nodes) > 1, reason="several NUMA nodes")


def affinities(folder: Path, world_size: int) -> list[list[int]]:
    """The CPUs of each rank, the same for all of its threads."""
    ranks = [json.loads((folder / str(rank)).read_text()) for rank in range(world_size)]
    for masks in ranks:
        assert all(mask == masks[0] for mask in masks)
    return [masks[0] for masks in ranks]


def launched(folder: Path, placement: CpuAffinity, world_size: int = 2) -> list[list[int]]:
    launch(writes_affinity(folder), world_size, 1, timeout_s=30, placement=placement)
    return affinities(folder, world_size)


@SEVERAL_CPUS
def test_ranks_get_disjoint_cores(tmp_path):
    first, second = launched(tmp_path, "cores")
    assert first and second and not set(first) & set(second)
    assert {*first, *second} <= set(USABLE)
    assert sorted(os.sched_getaffinity(0)) == USABLE


@pytest.mark.parametrize("placement", [pytest.param("auto", marks=ONE_NODE), "none"])
def test_affinity_is_unchanged_on_one_numa_node_or_without_placement(tmp_path, placement):
    assert launched(tmp_path, placement) == [USABLE, USABLE]


@SEVERAL_CPUS
def test_cpu_lists_of_the_user_are_applied(tmp_path):
    first, last = USABLE[0], USABLE[-1]
    lists = (last, f"{first},{last}", f"{first}")
    assert launched(tmp_path, lists) == [[last], [first, last]]


@pytest.mark.parametrize(
    ("lists", "complaint"),
    [
        (("0-99999", "0"), r"train\.placement\.0: rank 0 of this machine may not use CPU .*: "),
        ((str(USABLE[0]),), r"train\.placement: CPUs for 1 of the 2 ranks of this machine: name "),
    ],
)
def test_invalid_cpu_lists_are_refused_in_one_line(lists, complaint):
    with pytest.raises(UserError, match=rf"^{complaint}[^\n]*$"):
        launch(lambda group: None, 2, 1, timeout_s=30, placement=lists)


def test_ranks_share_a_single_core(tmp_path):
    def call() -> None:
        os.sched_setaffinity(0, {USABLE[-1]})
        launch(writes_affinity(tmp_path), 2, 1, timeout_s=30, placement="cores")

    assert Command(tmp_path / "command", call).wait(60) == 0
    assert affinities(tmp_path, 2) == [[USABLE[-1]]] * 2


@SEVERAL_CPUS
def test_auto_binds_ranks_on_several_numa_nodes(tmp_path):
    """Of a made-up machine with the CPUs of this one on two nodes."""
    half = len(USABLE) // 2
    nodes = tmp_path / "devices/system/node"
    for node, cpus in enumerate((USABLE[:half], USABLE[half:])):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}/cpulist").write_text(",".join(map(str, cpus)))
    (nodes / "has_memory").write_text("0-1")
    memory = run_preferring(0)

    def on_rank(group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
        rank = dist.get_rank(group)
        take_placement("auto", rank, dist.FileStore(str(tmp_path / "store"), 2), tmp_path)
        if rank == 0:
            assert policy_nodes() == memory
        return {"cpus": torch.tensor(sorted(os.sched_getaffinity(0)))}

    first, second = (ranks["cpus"].tolist() for ranks in run_ranks(2, on_rank))
    assert (first, second) == (USABLE[:half], USABLE[half:])


def run_preferring(node: int) -> tuple[int, ...]:
    """The policy of a thread that prefers `node`: containers may forbid it."""
    found: list[tuple[int, ...]] = []
    thread = threading.Thread(target=lambda: (prefer_node(node), found.append(policy_nodes())))
    thread.start()
    thread.join()
    return found[0]


TWO = ["--standalone", "--nproc-per-node=2"]


def under_torchrun(folder: Path, cpus: list[int], first: str = "") -> list[list[int]]:
    """Output of ranks of torchrun, which may use `cpus`."""
    worker = "workers.writes_affinity(folder)"
    line = torchrun(folder, worker, 2, *TWO, placement="cores", first=first)
    os.sched_setaffinity(0, cpus)
    try:
        agent = forked(folder / "agent", line)
    finally:
        os.sched_setaffinity(0, USABLE)
    assert agent.wait(60) == 0, agent.said()
    return affinities(folder, 2)


@ONE_NODE
@SEVERAL_CPUS
def test_ranks_of_torchrun_divide_its_affinity_mask(tmp_path):
    first, last = USABLE[0], USABLE[-1]
    assert under_torchrun(tmp_path, [first, last]) == [[first], [last]]


def test_ranks_of_torchrun_share_a_single_core(tmp_path):
    assert under_torchrun(tmp_path, USABLE[-1:]) == [USABLE[-1:]] * 2


@SEVERAL_CPUS
def test_ranks_bound_by_torchrun_keep_their_cores(tmp_path):
    """As with --numa-binding=exclusive, which needs GPUs."""
    first, last = USABLE[0], USABLE[-1]
    bind = f"os.sched_setaffinity(0, [({last}, {first})[int(os.environ['LOCAL_RANK'])]])"
    assert under_torchrun(tmp_path, USABLE, bind) == [[last], [first]]


def show(folder: Path, placement: str) -> Command:
    shutil.copy(ROOT / "params.yaml", folder)
    options = ["--run", "ddp", "--show-placement", "--set", f"train.placement={placement}"]
    return typed(folder / "command", folder, "stages.train", *options)


def test_show_placement_prints_cpus_without_training(tmp_path):
    first, last = USABLE[0], USABLE[-1]
    run = show(tmp_path, f'["{last}", "{first}"]')
    assert run.wait() == 0, run.said()
    shown = run.said().splitlines()
    for rank, (cpu, line) in enumerate(zip((last, first), shown, strict=True)):
        assert line.startswith(
            f"rank {rank}: CPUs {cpu} (control {cpu}, workers {cpu}), memory of "
        )
    assert not (tmp_path / "results").exists()


def test_malformed_cpu_list_is_one_line(tmp_path):
    run = show(tmp_path, '["0-", "1"]')
    complaint = "train.placement: list of CPUs '0-': write numbers and ranges, such as 0-3,8"
    assert (run.wait(), run.said()) == (2, f"train: error: {complaint}\n")


def test_memory_policy_is_inherited_by_child_threads_only() -> None:
    node = max(read_topology().memory_nodes, default=0)

    def prefer() -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        taken = prefer_node(node)
        with ThreadPoolExecutor(1) as inner:
            return taken, policy_nodes(), inner.submit(policy_nodes).result()

    before = policy_nodes()
    with ThreadPoolExecutor(1) as outer:
        taken, own, inherited = outer.submit(prefer).result()
    assert own == inherited == ((node,) if taken else before)
    assert policy_nodes() == before


def test_missing_numa_node_leaves_the_policy_unchanged() -> None:
    before = policy_nodes()
    assert not prefer_node(4000)
    assert policy_nodes() == before
