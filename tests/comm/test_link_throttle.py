"""A link emulated in the ranks: which operations wait for it, and how long."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from shardlab.comm.traffic import LinkThrottle, Traffic

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.attach import make_collective
from shardlab.comm.collective import Native
from shardlab.comm.emulated_link import Links, emulated, interface_bytes, interface_frames
from shardlab.comm.ledger import Ledger
from shardlab.config.link import Link
from tests.comm import codec_factory
from tests.ranks import on_ranks, run_ranks

CPU = torch.device("cpu")
SIZE = 1 << 14
UNIT = Unit("unit", (Block("matrix", 128, 128),))


@pytest.mark.parametrize("route", codec_factory.ROUTES)
@on_ranks(4)
def test_operations_take_as_long_as_their_link(group, route) -> None:
    """8 bits per byte of the ledger at the rate, and the delay for each of its collectives."""
    ledger = Ledger()
    ledger.traffic.throttle = LinkThrottle(delay_ms=10, bits_per_second=10_000_000)
    # by its module, since kept ranks cannot be sent a route: compiled operators are no data
    collective = make_collective(group, ledger, "gradients", codec_factory.ROUTES[route])
    size, start = collective.world_size, time.perf_counter()
    shard, vector = torch.randn(SIZE // size), torch.randn(SIZE)
    collective.reduce_scatter(shard, vector, 1.0, UNIT)
    collective.all_reduce(vector, 1.0, UNIT)
    collective.all_gather(vector, shard, UNIT)
    taken = time.perf_counter() - start
    account = ledger.accounts["gradients"]
    needed = account.bytes_wire * 8 / 10e6 + account.collectives * 10e-3
    # all that time a collective was under way
    assert needed <= ledger.traffic.seconds <= taken


@on_ranks(2)
def test_delay_begins_when_the_operation_ends(group) -> None:
    traffic = Traffic()
    traffic.throttle = LinkThrottle(delay_ms=100)
    start = time.perf_counter()
    with traffic.operation(1, CPU):
        if dist.get_rank(group) == 0:
            time.sleep(0.2)
        dist.barrier(group)
    # the other rank may have begun later
    if dist.get_rank(group) == 0:
        assert time.perf_counter() - start >= 0.3


def operate_in_four_threads(traffic, nbytes, seconds):
    def operate(_):
        with traffic.operation(nbytes, CPU):
            time.sleep(seconds)

    start = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(operate, range(4)))
    return time.perf_counter() - start


def test_operations_of_several_threads_share_one_link():
    traffic = Traffic()
    traffic.throttle = LinkThrottle(delay_ms=0, bits_per_second=8_000_000)
    assert operate_in_four_threads(traffic, 100_000, 0.0) >= 0.4


def test_time_of_concurrent_operations_counts_once():
    traffic = Traffic()
    taken = operate_in_four_threads(traffic, 1, 0.1)
    assert 0.1 <= traffic.seconds <= taken


def test_time_of_a_failed_operation_ends():
    traffic = Traffic()
    with pytest.raises(ZeroDivisionError), traffic.operation(1, CPU):
        _ = 1 / 0
    before = traffic.seconds
    time.sleep(0.01)
    assert traffic.seconds == before > 0


@pytest.mark.long
@pytest.mark.fresh_ranks  # a thread of gloo calls Python, which then counts it
@on_ranks(2)
def test_overlapped_operations_do_not_block(group) -> None:
    """DDP's buckets: the gradients of one are computed while another is on the link."""
    ledger = Ledger()
    ledger.traffic.throttle = LinkThrottle(delay_ms=2000, bits_per_second=100_000_000)
    collective = Native(group, ledger, "gradients")
    vectors = [torch.ones(1000) * dist.get_rank(group) for _ in range(2)]
    start = time.perf_counter()
    means = [collective.start_all_reduce(vector, 0.5, UNIT) for vector in vectors]
    assert not any(mean.is_completed() for mean in means)
    for mean, vector in zip(means, vectors, strict=True):
        mean.wait()
        assert vector.eq(0.5).all()
    assert time.perf_counter() - start >= 2
    shards = torch.ones(500), torch.empty(1000)
    work = collective.start_all_gather(shards[1], shards[0], UNIT)
    time.sleep(2.1)
    start = time.perf_counter()
    work.wait()
    # far less than the delay: the link was done
    assert time.perf_counter() - start < 2 and shards[1].eq(1).all()


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


def test_without_a_link_nothing_is_emulated():
    with emulated(None, 2) as emulation:
        assert emulation == (None, None, "none")


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
