"""The ranks of a node share a file that has no name, past the page cache or as tensors."""

import resource

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.engines.slide.shared_file import NodeFile
from tests.descriptors import opened
from tests.ranks import on_ranks

pytestmark = pytest.mark.fresh_ranks

LAYOUT = {"first": 30_006, "second": 12, "third": 123_456}
"""bytes, of which each of three ranks has as many"""


def parts_of(file, rank, world_size):
    return {
        name: file.part(name, rank * (size // world_size), size // world_size)
        for name, size in LAYOUT.items()
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_parts_that_share_blocks_do_not_disturb_each_other(group, tmp_path, world_size) -> None:
    rank = dist.get_rank(group)
    file = NodeFile.create(group, LAYOUT, tmp_path / "new")
    for part in parts_of(file, rank, world_size).values():
        for _ in range(20):
            buffer, again = part.buffer().random_(), part.buffer()
            part.write(buffer)
            part.read(again)
            assert torch.equal(part.inside(buffer), part.inside(again))
        part.write(buffer.fill_(10 + rank))
    dist.barrier(group)
    for name, size in LAYOUT.items():
        ranks = torch.arange(world_size, dtype=torch.uint8)
        expected = 10 + ranks.repeat_interleave(size // world_size)
        assert torch.equal(file.tensor(name, torch.uint8, (size,)), expected)


@on_ranks(2)
def test_alternating_writes_to_tensors_and_parts_are_visible_to_both(group, tmp_path) -> None:
    rank = dist.get_rank(group)
    file = NodeFile.create(group, LAYOUT, tmp_path)
    whole = file.tensor("third", torch.uint8, (LAYOUT["third"],))
    part, size = parts_of(file, rank, 2)["third"], LAYOUT["third"] // 2
    assert not whole.any()
    dist.barrier(group)
    for turn in range(5):
        if rank == turn % 2:  # for both
            whole.copy_(torch.arange(whole.numel()).add(turn).remainder(256))
        dist.barrier(group)
        file.flush()
        dist.barrier(group)
        buffer = part.buffer()
        part.read(buffer)
        own = torch.arange(rank * size, (rank + 1) * size).add(turn).remainder(256)
        assert torch.equal(part.inside(buffer), own.to(torch.uint8))
        part.write(buffer.add_(1))
        dist.barrier(group)
        seen = torch.arange(whole.numel()).add(turn).remainder(256).add(1).to(torch.uint8)
        assert torch.equal(whole, seen)
        dist.barrier(group)


@on_ranks(2)
def test_a_file_has_no_name_and_tensors_outlive_its_close(group, tmp_path) -> None:
    file = NodeFile.create(group, LAYOUT, tmp_path)
    tensor = file.tensor("second", torch.float32, (3,))
    assert [*tmp_path.iterdir()] == []
    before = len(opened(str(tmp_path)))
    file.close()
    assert len(opened(str(tmp_path))) == before - 2
    assert tensor.eq(0).all()


@pytest.mark.parametrize("limited", [0, 1])
@on_ranks(2)
def test_too_little_disk_space_is_raised_on_all_ranks(group, tmp_path, limited) -> None:
    """Room is taken by the first rank for all."""
    if dist.get_rank(group) == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
    if limited:
        NodeFile.create(group, LAYOUT, tmp_path)
    else:
        with pytest.raises(UserError, match=rf"^{tmp_path}: 163,840 more bytes do not fit"):
            NodeFile.create(group, LAYOUT, tmp_path)
