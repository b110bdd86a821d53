"""Ranks communicate over links of a known rate, which leave no trace on the machine."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links
from shardlab.comm.transport import Transport
from shardlab.config.machine import Link
from shardlab.core.errors import UserError
from tests.commands import said_after
from tests.ranks import run_ranks


def network():
    """The identity of the network namespace of this process."""
    return Path("/proc/self/ns/net").stat().st_ino


def test_ranks_in_separate_networks_reach_each_other(permitted):
    def on_rank(group):
        vector = torch.full((1000,), float(dist.get_rank(group)))
        dist.all_reduce(vector, group=group)
        assert vector.eq(3).all()
        return {"network": torch.tensor(network())}

    networks = {network()}
    # two sets of links at once are separate
    with Links(3, Link(rate="1gbit")) as links, Links(3, Link(rate="1gbit")) as others:
        for each in (links, others):
            networks |= {int(r["network"]) for r in run_ranks(3, on_rank, links=each)}
    assert len(networks) == 7


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 3])
def test_exchange_is_limited_to_the_rate(permitted, world_size):
    """4 MiB per rank at 20 Mbit/s are 1.7 s; without the limit they are some milliseconds."""
    size = (4 << 20) // (world_size - 1)

    def on_rank(group):
        given = [torch.ones(size, dtype=torch.uint8)] * world_size
        taken = [torch.zeros(size, dtype=torch.uint8) for _ in range(world_size)]
        dist.barrier(group)
        start = time.perf_counter()
        Transport(group).all_to_all(given, taken)
        dist.barrier(group)
        assert time.perf_counter() - start >= 1

    with Links(world_size, Link(rate="20mbit")) as links:
        run_ranks(world_size, on_rank, links=links)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def test_missing_permission_names_the_fix(tmp_path):
    def enter():
        with pytest.raises(UserError, match="not permitted: run as root, or put `unshare"):
            Links(2, Link(rate="1gbit")).__enter__()

    said_after(partial(os.seteuid, 65534), enter, tmp_path)


def test_missing_iproute2_names_the_fix(permitted, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="install iproute2"):
        Links(2, Link(rate="1gbit")).__enter__()
