"""A link emulated in the ranks: which operations wait for it, and how long."""

import time

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.base import Block, Unit
from shardlab.comm.emulated_link import (
    Links,
    LinkThrottle,
    emulated,
    interface_bytes,
    interface_frames,
)
from shardlab.comm.ledger import Ledger
from shardlab.comm.transport import Traffic
from shardlab.comm.uncompressed import Native
from shardlab.config.machine import Link
from tests.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")
SIZE = 1 << 14
UNIT = Unit("unit", (Block("matrix", 128, 128),))


def test_time_of_a_failed_operation_ends():
    traffic = Traffic()
    with pytest.raises(ZeroDivisionError), traffic.operation(1, CPU):
        _ = 1 / 0
    before = traffic.seconds
    time.sleep(0.01)
    assert traffic.seconds == before > 0


@pytest.mark.fresh_ranks
@pytest.mark.parametrize("throttle", [None, LinkThrottle(delay_ms=1)])
@on_ranks(2)
def test_error_of_an_overlapped_operation_is_raised(group, throttle) -> None:
    if dist.get_rank(group) == 0:
        return  # its process ends
    ledger = Ledger()
    ledger.traffic.throttle = throttle
    native = Native(group, ledger, "gradients")
    mean = native.start_all_reduce(torch.ones(1000), 0.5, UNIT)
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        mean.wait()


@on_ranks(1)
def test_single_rank_has_no_link(group) -> None:
    ledger = Ledger()
    ledger.traffic.throttle = LinkThrottle(delay_ms=60_000, bits_per_second=1)
    collective = Native(group, ledger, "gradients")
    collective.all_reduce(torch.ones(10), 1.0, UNIT)
    collective.start_all_reduce(torch.ones(10), 1.0, UNIT).wait()
    collective.start_all_gather(torch.ones(10), torch.ones(10), UNIT).wait()
    assert ledger.traffic.seconds == 0


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
