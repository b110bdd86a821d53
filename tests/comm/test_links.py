"""Ranks communicate over links of a known rate, which namespaces or the ranks emulate."""

import json
import os
import subprocess
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links, LinkThrottle, emulated
from shardlab.core.errors import UserError
from shardlab.core.link import Link
from shardlab.engines.slide_groups import node_groups
from tests.commands import said_after
from tests.ranks import run_ranks


def test_ranks_in_separate_networks_reach_each_other_at_the_rate(permitted):
    def on_rank(group):
        size = dist.get_world_size(group)
        vector = torch.full((1000,), float(dist.get_rank(group)))
        dist.all_reduce(vector, group=group)
        assert vector.eq(size * (size - 1) / 2).all()
        here, across = node_groups(group)
        assert across is not None
        local = [int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        shown = subprocess.run(["tc", "-json", "qdisc"], capture_output=True, check=True)
        bucket = next(each for each in json.loads(shown.stdout) if each["kind"] == "tbf")
        members = [dist.get_process_group_ranks(each) for each in (here, across)]
        rate = 8 * bucket["options"]["rate"]
        return {"rate": torch.tensor(rate), "local": torch.tensor(local)} | {
            f"group {number}": torch.tensor(ranks) for number, ranks in enumerate(members)
        }

    # two sets of links at once are separate; the nodes of the second have two ranks
    tiers = Link(rate=("1gbit", "20mbit"), ranks_per_node=2)
    with Links(3, Link(rate="1gbit")) as links, Links(4, tiers) as others:
        flat = run_ranks(3, on_rank, links=links)
        nodes = run_ranks(4, on_rank, links=others)
    assert [int(rank["rate"]) for rank in flat] == [10**9] * 3
    assert [rank["local"].tolist() for rank in flat] == [[0, 3], [1, 3], [2, 3]]
    assert [rank["group 0"].tolist() for rank in flat] == [[0], [1], [2]]
    assert [int(rank["rate"]) for rank in nodes] == [10**9] * 2 + [2 * 10**7] * 2
    assert [rank["local"].tolist() for rank in nodes] == [[0, 2], [1, 2]] * 2
    # slide shares memory inside a node
    assert [rank["group 0"].tolist() for rank in nodes] == [[0, 1]] * 2 + [[2, 3]] * 2
    assert [rank["group 1"].tolist() for rank in nodes] == [[0, 2], [1, 3]] * 2


class Clock:
    """Time that passes in sleep alone."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_operations_share_the_link_and_end_after_its_delay():
    with patch("shardlab.comm.emulated_link.time", Clock()) as clock:
        link = LinkThrottle(delay_ms=500, bits_per_second=8_000)
        first, second = link.carry(1_000), link.carry(2_000)  # at once: one after another
        assert (first, second) == (1.0, 3.0)
        link.end(second)
        assert clock.now == 3.5
        link.end(first)
        assert clock.now == 3.5
        assert link.carry(1_000) == 4.5, "it was idle"


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
    for delay_ms in (0, 1):
        with emulated(Link(rate="1gbit", delay_ms=delay_ms), 2) as emulation:
            assert isinstance(emulation.links, Links) and emulation.kind == "namespaces"
            assert (emulation.throttle is None) == (delay_ms == 0)


def test_ranks_emulate_the_link_elsewhere(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")  # no iproute2
    with emulated(Link(rate="1gbit", delay_ms=1), 2) as emulation:
        assert emulation.kind == "in-process" and emulation.throttle is not None
        assert emulation.links.enter(0) == "lo"
    assert capsys.readouterr().err.count("\n") == 1
    for link in (Link(rate="1gbit", ranks_per_node=2), Link(rate=("1gbit", "1mbit"))):
        with pytest.raises(UserError, match=r"nodes need namespaces: .*install iproute2"):
            emulated(link, 2 * link.ranks_per_node).__enter__()
