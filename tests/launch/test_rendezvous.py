"""Ranks of one attempt find each other, whatever earlier attempts left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.launch.placement import gpu_index, own_gpu
from shardlab.launch.rank import Rendezvous, rendezvous
from shardlab.transport.object_collectives import device_of


@pytest.fixture
def stores(tmp_path):
    """Opens one store again and again, as every rank does for itself."""
    return lambda: dist.FileStore(str(tmp_path / "store"))


def attempt(stores, order: list[int], gpus: list[str] | None = None, wait_s=20) -> list[Rendezvous]:
    """All ranks meet, coming in an order; what each found, in rank order."""
    gpus = gpus or [""] * len(order)
    limit = timedelta(seconds=wait_s)
    with ThreadPoolExecutor(len(order)) as threads:
        found = {
            rank: threads.submit(rendezvous, stores(), rank, len(order), gpus[rank], limit)
            for rank in order
        }
    return [found[rank].result() for rank in sorted(order)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 0, 2]])
def test_an_attempt_never_joins_an_earlier_one(stores, order):
    names = []
    for _ in range(4):
        joined = attempt(stores, order)
        assert len({each.name for each in joined}) == 1
        names.append(joined[0].name)
        # what a rank finds under its own names is of this attempt
        assert all(each.store.add("ranks", 1) == n for n, each in enumerate(joined, 1))
    assert len(set(names)) == 4


def test_incomplete_earlier_attempt_is_ignored(stores):
    with pytest.raises(TimeoutError, match="rank 1, 2 did not join"):
        rendezvous(stores(), 0, 3, "", timedelta(seconds=0.1))
    assert len({each.name for each in attempt(stores, [1, 2, 0])}) == 1


def test_rank_without_rank_0_times_out(stores):
    with pytest.raises(TimeoutError, match="rank 1 found no rendezvous of rank 0"):
        rendezvous(stores(), 1, 2, "", timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("gpus", "nccl"),
    [
        (["GPU-a", "GPU-b"], True),
        (["GPU-a", "GPU-a"], False),  # shared
        (["GPU-a", ""], False),
        (["", ""], False),
    ],
)
def test_nccl_needs_a_gpu_for_every_rank(stores, gpus, nccl):
    expected = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    assert [each.backend for each in attempt(stores, [0, 1], gpus)] == [expected] * 2


@pytest.mark.parametrize(
    ("visible", "forked", "expected"),
    [
        (8, True, 7),  # all GPUs of the machine
        (8, False, 7),
        (1, False, 0),  # the GPU of this rank alone
        (1, True, None),  # shared by the ranks
        (0, False, None),
    ],
)
def test_rank_takes_the_gpu_of_its_local_rank(monkeypatch, visible, forked, expected):
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert gpu_index(visible, forked=forked) == expected


@pytest.mark.parametrize("chosen", [0, 5])
@pytest.mark.parametrize("asked", ["cuda", "cuda:3"])
def test_a_gpu_is_that_of_the_local_rank_unless_the_program_says_otherwise(
    monkeypatch, chosen, asked
):
    current = pretend_gpus(monkeypatch, chosen)
    found = run_alone(lambda group: own_gpu(torch.device(asked), group))
    expected = 3 if asked == "cuda:3" else chosen or 7
    assert found == torch.device("cuda", expected) and current == [expected]


def test_ranks_that_share_a_gpu_are_refused(monkeypatch):
    pretend_gpus(monkeypatch, 0)

    def both(found, own, group):
        found[:] = [own, own]

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_gather_object", both)
    with pytest.raises(UserError, match=r"ranks 0, 1 share GPU .*: start one rank for each GPU"):
        own_gpu(torch.device("cuda"), None)


def pretend_gpus(monkeypatch, current: int) -> list[int]:
    """Pretend to be local rank 7 of 8 with as many GPUs; the list will hold the one that is set."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    was_set = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", was_set.append)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda n: SimpleNamespace(uuid=n))
    return was_set


def run_alone(function):
    """Call a function with a process group of this process alone."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        return function(dist.group.WORLD)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("config", ["cpu:gloo", "cpu:gloo,cuda:nccl"])
def test_the_device_is_that_of_the_backends_also_where_torch_chose_them(monkeypatch, config):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert run_alone(device_of).type == ("cuda" if "nccl" in config else "cpu")
    assert run_alone(dist.get_backend) == "undefined"
