"""Ranks communicate over links of a known rate, which leave no trace on the machine."""

import ctypes
import json
import os
import subprocess
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
from shardlab.train.launch import launch
from tests.commands import Command, said_after, wait_for
from tests.namespaces import held, opened_by
from tests.ranks import run_ranks


def network():
    """The identity of the network namespace of this process."""
    return Path("/proc/self/ns/net").stat().st_ino


def names():
    """The namespaces and devices of the machine, which links must never change."""
    netns, devices = (
        json.loads(subprocess.check_output(["ip", "-json", *what]) or "[]")
        for what in (["netns"], ["link"])
    )
    return netns, [device["ifname"] for device in devices]


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


def test_links_of_a_killed_owner_are_removed(permitted, tmp_path):
    def worker(group):
        os.write(1, b"ready\n")  # at once, whatever the other rank writes
        time.sleep(60)

    def own() -> None:
        with Links(2, Link(rate="1gbit")) as links:
            launch(worker, 2, threads=1, timeout_s=60, links=links)

    before = names()
    owner = Command(tmp_path, own)
    wait_for(lambda: owner.said().count("ready") == 2)
    namespaces = opened_by(owner.pid)
    assert len(namespaces) == 3 and held(namespaces) == namespaces
    owner.kill()
    wait_for(lambda: not held(namespaces))
    assert names() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights")
def drop_capabilities():
    """Be a root without rights, as in a container (capset(2))."""
    header, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, nothing) == 0


@pytest.mark.parametrize(
    ("lose", "fix"),
    [
        (partial(os.seteuid, 65534), "run as root, or put `unshare"),
        (drop_capabilities, "start the container with --cap-add NET_ADMIN --cap-add SYS_ADMIN"),
    ],
)
def test_missing_permission_names_the_fix(tmp_path, lose, fix):
    def enter():
        with pytest.raises(UserError, match=f"not permitted: {fix}"):
            Links(2, Link(rate="1gbit")).__enter__()

    said_after(lose, enter, tmp_path)


def test_missing_iproute2_names_the_fix(permitted, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="install iproute2"):
        Links(2, Link(rate="1gbit")).__enter__()
