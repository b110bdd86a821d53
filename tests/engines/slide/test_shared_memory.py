"""The ranks of a node share regions of memory that have no name."""

import gc
import os
import resource
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.engines.slide.shared_memory import NodeMemory, _open_file
from shardlab.train.launch import launch
from tests.commands import launching, wait_for
from tests.descriptors import SHARED, opened
from tests.engines.slide.unwatched_ranks import outcomes
from tests.ranks import on_ranks

pytestmark = pytest.mark.fresh_ranks

LAYOUT = {"parameters": 40_004, "moments": 8, "gradients": 1_000_000}
UNUSUAL = (40 << 20) + 12_288
"""bytes of a region that no other file has"""


def create(group, layout=LAYOUT):
    return NodeMemory.create(group, layout, 2, timeout_s=30.0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_all_ranks_see_the_same_bytes(group, world_size) -> None:
    memory, rank = create(group), dist.get_rank(group)
    parts = memory.tensor("parameters", torch.float32, (world_size, 5))
    assert parts.eq(0).all()
    dist.barrier(group)
    parts[rank] = torch.arange(5.0) + 10 * rank
    memory.progress.publish("offloaded", 0, 1)
    memory.progress.wait("offloaded", 0, 1)
    memory.close()
    assert torch.equal(parts, torch.arange(5.0) + 10 * torch.arange(world_size)[:, None])


@on_ranks(1)
def test_regions_do_not_overlap(group) -> None:
    memory = create(group)
    regions = [memory.tensor(name, torch.uint8, (size,)) for name, size in LAYOUT.items()]
    for number, region in enumerate(regions, 1):
        region.fill_(number)
    memory.progress.publish("offloaded", 1, 1)
    for number, region in enumerate(regions, 1):
        assert region.eq(number).all()
    memory.progress.wait("offloaded", 1, 1)


@on_ranks(1)
def test_a_view_is_aligned_and_is_no_copy(group) -> None:
    memory = create(group)
    words = memory.tensor("moments", torch.float64, (1,))
    halves = memory.tensor("moments", torch.bfloat16, (2, 2))
    assert words.data_ptr() == halves.data_ptr()
    assert words.data_ptr() % os.sysconf("SC_PAGE_SIZE") == 0
    words.fill_(1.0)
    assert halves.view(torch.uint8).flatten().tolist() == [0, 0, 0, 0, 0, 0, 0xF0, 0x3F]


@on_ranks(1)
def test_tensors_outlive_the_close_and_the_memory_ends_with_them(group) -> None:
    memory = create(group)
    region = memory.tensor("moments", torch.float64, (1,))
    memory.close()
    del memory
    gc.collect()
    region.fill_(3.0)
    assert mapped()
    assert float(region) == 3.0
    del region
    gc.collect()
    assert not mapped()


@on_ranks(2)
def test_no_file_descriptor_stays_after_the_close(group) -> None:
    memory = create(group)
    assert len(opened(*SHARED)) == 2  # one of the mapping, one of the other rank
    memory.close()
    del memory
    gc.collect()
    assert opened(*SHARED) == []


def mapped(pid="self"):
    return "/memfd:shardlab " in Path(f"/proc/{pid}/maps").read_text()


def named():
    """Files of this size where shared memory and temporary files have names."""
    found = [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()]
    sizes = range(UNUSUAL, UNUSUAL + (1 << 20))
    return [path for path in found if path.exists() and path.stat().st_size in sizes]


def test_no_named_files_exist_before_during_and_after_a_kill(tmp_path):
    def worker(group):
        memory = create(group, {"all": UNUSUAL})
        memory.tensor("all", torch.uint8, (UNUSUAL,)).fill_(1)
        dist.barrier(group)
        (tmp_path / f"{os.getpid()}.pid").touch()
        memory.progress.wait("offloaded", 0, 1)

    before = named()
    command = launching(tmp_path, worker, 2)
    wait_for(lambda: len([*tmp_path.glob("*.pid")]) == 2)
    pids = [int(path.stem) for path in tmp_path.glob("*.pid")]
    assert all(map(mapped, pids))
    assert named() == before
    os.kill(pids[0], signal.SIGKILL)
    assert command.wait() == 1
    assert "was killed by signal 9" in command.said()
    command.leaves_nothing()
    assert named() == before


def refused(world_size, layout=LAYOUT, change=lambda rank: None):
    """Return the one line that every rank raises, after `change` on each of them."""

    def function(group):
        change(dist.get_rank(group))
        try:
            create(group, layout)
        finally:
            assert not mapped()

    lines = outcomes(world_size, function)
    line = lines[0]
    assert lines == [line] * world_size
    assert "\n" not in line
    return line


@pytest.mark.parametrize("world_size", [1, 3])
def test_too_large_a_request_is_refused_before_allocation(world_size):
    line = refused(world_size, {"all": 1 << 50})
    assert line.startswith(
        "UserError: slide: the ranks of a node share 1048576.00 GiB of host memory, and only "
    )


def test_launcher_shows_the_refusal():
    def worker(group):
        create(group, {"all": 1 << 50})

    with pytest.raises(UserError, match=r"^slide: [^\n]* are free: take a smaller model[^\n]*$"):
        launch(worker, 2, threads=1, timeout_s=30)


def limits_file_sizes(rank):
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))


def limits_addresses(rank):
    if rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + (32 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


@pytest.mark.parametrize(
    ("change", "reported"),
    [(limits_file_sizes, "file too large"), (limits_addresses, "cannot allocate memory")],
)
def test_failed_allocation_of_one_rank_is_raised_on_all(change, reported):
    assert f"host memory, and {reported}: take" in refused(2, {"all": 64 << 20}, change)


def test_missing_descriptors_on_one_rank_are_raised_on_all():
    def function(group):
        if dist.get_rank(group) == 1:
            free = [os.dup(0) for _ in range(3)]
            for number in free:
                os.close(number)
            # two are left, for the mapping and one of two other ranks
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[2], free[2]))
        create(group)

    line, *others = outcomes(3, function)
    assert others == [line] * 2
    assert line.endswith("cannot share host memory (rank 1: [Errno 24] Too many open files)")


def test_ranks_with_unequal_layouts_are_refused():
    def function(group):
        create(group, LAYOUT | {"moments": 8 + dist.get_rank(group)})

    first, second = outcomes(2, function)
    assert first == second
    assert "not the memory that this rank expects: start all ranks of a node with one" in first


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_ranks_of_different_users_are_refused():
    def change(rank):
        if rank == 1:
            os.setuid(65534)

    line = refused(2, change=change)
    assert "Permission denied: the ranks of a node share memory by it: run them all as one" in line


def test_foreign_file_is_not_opened():
    with (
        Path(sys.executable).open("rb") as other,
        pytest.raises(UserError, match="not the memory that"),
    ):
        _open_file(os.getpid(), other.fileno(), b"", ExitStack())
