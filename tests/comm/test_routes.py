"""Laws of all routes: profiles show their units, and their operations take as long as their link;
uncompressed operations that are started have the bits and counts of the blocking ones.
"""

import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardlab.codecs.base import Block, Unit
from shardlab.comm.attach import make_collective
from shardlab.comm.emulated_link import LinkThrottle
from shardlab.comm.ledger import Ledger
from shardlab.comm.uncompressed import Native
from shardlab.profiling.labels import unit_of
from tests.comm import codec_factory
from tests.ranks import on_ranks

SIZE = 1 << 14
UNIT = Unit("unit", (Block("matrix", 64, 252), Block("bias", 256, 1)))


@on_ranks(2)
def test_started_operations_equal_the_blocking_ones(group) -> None:
    results, rank = [], dist.get_rank(group)
    for started in (False, True):
        native = Native(group, Ledger(), "gradients")
        vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(rank))
        shard, gathered = vector[: SIZE // 2].clone(), torch.empty(SIZE)
        if started:
            assert native.start_all_gather(gathered, shard, UNIT) is None
            native.start_all_reduce(vector, 0.5, UNIT).wait()
        else:
            native.all_gather(gathered, shard, UNIT)
            native.all_reduce(vector, 0.5, UNIT)
        results.append(([gathered.tolist(), vector.tolist()], native.account.sums()))
    assert results[0] == results[1]


@on_ranks(2)
def test_profiles_show_the_unit_of_every_operation(group) -> None:
    vector, shard = torch.randn(SIZE), torch.empty(SIZE // 2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:  # once, since it takes a second
        for route in codec_factory.ROUTES:
            ours = make_collective(group, Ledger(), "gradients", codec_factory.ROUTES[route])
            ours.reduce_scatter(shard, vector, 1.0, UNIT._replace(name=f"scatter {route}"))
            ours.all_gather(vector, shard, UNIT._replace(name=f"gather {route}"))
            ours.all_reduce(vector, 1.0, UNIT._replace(name=f"sum {route}"))
    units = {unit_of(event.name) for event in seen.events()}
    operations, routes = ("scatter", "gather", "sum"), codec_factory.ROUTES
    assert units >= {f"{what} {route}" for route in routes for what in operations}


@on_ranks(4)
def test_operations_take_as_long_as_their_link(group) -> None:
    """8 bits per byte of the ledger at the rate, and the delay for each of its collectives."""
    for route in codec_factory.ROUTES.values():
        ledger = Ledger()
        ledger.traffic.throttle = LinkThrottle(delay_ms=10, bits_per_second=20_000_000)
        collective = make_collective(group, ledger, "gradients", route)
        size, start = collective.world_size, time.perf_counter()
        shard, vector = torch.randn(SIZE // size), torch.randn(SIZE)
        collective.reduce_scatter(shard, vector, 1.0, UNIT)
        collective.all_reduce(vector, 1.0, UNIT)
        collective.all_gather(vector, shard, UNIT)
        taken = time.perf_counter() - start
        account = ledger.accounts["gradients"]
        needed = account.bytes_wire * 8 / 20e6 + account.collectives * 10e-3
        # all that time a collective was under way
        assert needed <= ledger.traffic.seconds <= taken


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
    assert ledger.traffic.seconds == 0
