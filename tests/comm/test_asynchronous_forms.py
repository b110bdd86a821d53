"""Laws of all routes: start and wait have the bits of the blocking form; profiles show units."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardlab.codecs.base import Block, Unit
from shardlab.comm.attach import make_collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Account, Ledger
from shardlab.profiling.labels import unit_of
from tests.comm import codec_factory
from tests.ranks import on_ranks

SIZE = 1 << 12
UNIT = Unit("unit", (Block("matrix", 64, 60), Block("bias", 256, 1)))
TIMES = {"extra_collective_s", "encode_s", "decode_s"}


def route_of(name):
    """By its module, since kept ranks cannot be sent a route: compiled operators are no data."""
    return codec_factory.ROUTES[name]


def counts(account: Account):
    return {name: value for name, value in vars(account).items() if name not in TIMES}


def reduced(collective, rank, started):
    """The results of two steps of each collective."""
    size, results = collective.world_size, []
    generator = torch.Generator().manual_seed(rank)

    def run(name, *arguments, unit=UNIT):
        if started:
            assert getattr(collective, f"start_{name}")(*arguments, unit).wait()
        else:
            getattr(collective, name)(*arguments, unit)

    for _ in range(2):
        vector, shard = torch.randn(SIZE, generator=generator), torch.empty(SIZE // size)
        run("reduce_scatter", shard, vector, 1 / size)
        gathered = torch.empty(SIZE)
        run("all_gather", gathered, shard)
        run("all_reduce", vector, 1 / size, unit=UNIT._replace(name="whole"))
        results += [shard, gathered, vector]
    return results


@pytest.mark.parametrize("route", codec_factory.ROUTES)
@on_ranks(4)
def test_start_and_wait_equal_the_blocking_form(group, route) -> None:
    ledgers = Ledger(), Ledger()
    blocking, started = (
        reduced(
            make_collective(group, ledger, "gradients", route_of(route), ErrorFeedback()),
            dist.get_rank(group),
            asynchronous,
        )
        for ledger, asynchronous in zip(ledgers, (False, True), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(blocking, started, strict=True))
    first, second = (counts(ledger.accounts["gradients"]) for ledger in ledgers)
    assert first == second


@on_ranks(2)
def test_profiles_show_the_unit_of_every_operation(group) -> None:
    vector, shard = torch.randn(SIZE), torch.empty(SIZE // 2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:  # once, since it takes a second
        for route in codec_factory.ROUTES:
            ours = make_collective(group, Ledger(), "gradients", route_of(route))
            ours.reduce_scatter(shard, vector, 1.0, UNIT._replace(name=f"scatter {route}"))
            ours.all_gather(vector, shard, UNIT._replace(name=f"gather {route}"))
            ours.all_reduce(vector, 1.0, UNIT._replace(name=f"sum {route}"))
    units = {unit_of(event.name) for event in seen.events()}
    operations, routes = ("scatter", "gather", "sum"), codec_factory.ROUTES
    assert units >= {f"{what} {route}" for route in routes for what in operations}
