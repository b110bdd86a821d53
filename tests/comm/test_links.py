"""Ranks communicate over links of a known rate, which namespaces or the ranks emulate."""

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links, emulated, interface_bytes, interface_frames
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


def test_namespaces_limit_the_rate_where_permitted(permitted):
    with emulated(Link(rate="1gbit"), 2) as emulation:
        assert isinstance(emulation.links, Links) and emulation.throttle is None
        assert emulation.kind == "namespaces"
    with emulated(Link(rate="1gbit", delay_ms=1), 2) as emulation:
        assert isinstance(emulation.links, Links) and emulation.throttle is not None


def test_ranks_emulate_the_link_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")  # no iproute2
    with emulated(Link(rate="1gbit", delay_ms=1), 2) as emulation:
        assert emulation.kind == "in-process" and emulation.throttle is not None
        assert emulation.links.enter(0) == "lo"
    assert capsys.readouterr().err.count("\n") == 1


def test_interface_counts_the_bytes_of_its_rank():
    assert interface_bytes() is None and interface_frames() is None

    def on_rank(group):
        before = interface_bytes()
        if dist.get_rank(group) == 0:
            dist.send(torch.zeros(1 << 20, dtype=torch.uint8), 1)
        else:
            dist.recv(torch.zeros(1 << 20, dtype=torch.uint8), 0)
        dist.barrier(group)
        return {"sent": torch.tensor(interface_bytes() - before)}

    with emulated(Link(rate="1gbit"), 2) as emulation:
        if emulation.kind != "namespaces":
            pytest.skip("the ranks have no network interfaces here")
        first, second = (r["sent"] for r in run_ranks(2, on_rank, links=emulation.links))
    assert 1 << 20 < first < 1.06 * (1 << 20)
    assert 0 < second < 0.1 * (1 << 20)
