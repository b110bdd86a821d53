"""Ranks of one attempt find each other, whatever earlier attempts left in the store."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from shardlab.comm.object_collectives import device_of
from shardlab.core.gpus import RankGpu
from shardlab.train.rank import Rendezvous, rendezvous


@pytest.fixture
def stores(tmp_path):
    """Opens one store again and again, as every rank does for itself."""
    return lambda: dist.FileStore(str(tmp_path / "store"))


def attempt(stores, order: list[int], gpus=None, wait_s=20) -> list[Rendezvous]:
    """All ranks meet, coming in an order; what each found, in rank order."""
    gpus = gpus or [None] * len(order)
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
        rendezvous(stores(), 0, 3, None, timedelta(seconds=0.1))
    assert len({each.name for each in attempt(stores, [1, 2, 0])}) == 1


def test_rank_without_rank_0_times_out(stores):
    with pytest.raises(TimeoutError, match="rank 1 found no rendezvous of rank 0"):
        rendezvous(stores(), 1, 2, None, timedelta(seconds=0.1))


@pytest.mark.parametrize(
    ("gpus", "nccl"),
    [
        (["GPU-a", "GPU-b"], True),
        (["GPU-a", "GPU-a"], False),  # shared
        (["GPU-a", None], False),
        ([None, None], False),
    ],
)
def test_nccl_needs_a_gpu_for_every_rank(stores, monkeypatch, gpus, nccl):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    gpus = [uuid and RankGpu(uuid, "H200", 141 * 10**9, True) for uuid in gpus]
    expected = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    assert [each.backend for each in attempt(stores, [0, 1], gpus)] == [expected] * 2


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
