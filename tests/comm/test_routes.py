"""Laws of all routes: profiles show their units, and their operations pass the link; uncompressed
operations that are started have the bits and counts of the blocking ones.
"""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardlab.codecs.base import Block, Unit
from shardlab.codecs.registry import make_codec, make_method
from shardlab.comm.codec_collective import Route
from shardlab.comm.emulated_link import LinkThrottle
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from shardlab.comm.uncompressed import Native
from shardlab.profiling.labels import unit_of
from tests.comm.wire import CountingLink
from tests.ranks import on_ranks

SIZE = 1 << 14
UNIT = Unit("unit", (Block("matrix", 64, 252), Block("bias", 256, 1)))
ROUTES = {
    "native": Route(make_method("none"), native=True),
    "all-to-all": Route(make_method("none")),
    "int8": Route(make_method("int8")),
    "variable size": Route(make_method("threshold:threshold=1.0")),
    "linear": Route(make_method("randomk")),
    "multi-phase": Route(make_method("powersgd")),
    "hierarchical": Route(make_method("int8"), between_nodes=make_codec("int4")),
    "bypass": Route(make_method("int8"), excluded=frozenset({"bias"}), warmup=1),
}


@on_ranks(2)
def test_started_operations_equal_the_blocking_ones(group) -> None:
    results, rank = [], dist.get_rank(group)
    for started in (False, True):
        native = Native(group, Ledger(ranks_per_node=2), "gradients")
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
        for name, route in ROUTES.items():
            ours = make_collective(group, Ledger(ranks_per_node=2), "gradients", route)
            ours.reduce_scatter(shard, vector, 1.0, UNIT._replace(name=f"scatter {name}"))
            ours.all_gather(vector, shard, UNIT._replace(name=f"gather {name}"))
            ours.all_reduce(vector, 1.0, UNIT._replace(name=f"sum {name}"))
    units = {unit_of(event.name) for event in seen.events()}
    assert units >= {f"{what} {name}" for name in ROUTES for what in ("scatter", "gather", "sum")}


@on_ranks(4)
def test_every_collective_and_every_byte_pass_the_link(group) -> None:
    for name, route in ROUTES.items():
        ledger = Ledger(ranks_per_node=2)
        ledger.traffic.throttle = link = CountingLink()
        ours = make_collective(group, ledger, "gradients", route)
        shard, vector = torch.randn(SIZE // 4), torch.randn(SIZE)
        ours.reduce_scatter(shard, vector, 1.0, UNIT)
        ours.all_reduce(vector, 1.0, UNIT)
        ours.all_gather(vector, shard, UNIT)
        account = ledger.accounts["gradients"]
        assert link.operations == account.collectives, name
        # where sizes vary, a rank may receive more than it sends
        assert link.bytes == account.bytes_wire or name == "variable size", name
        # between nodes alone: all of the second level, and no byte inside
        ledger.traffic.throttle = link = CountingLink(ranks_per_node=2)
        ledger.reset()
        ours.reduce_scatter(shard, vector, 1.0, UNIT)
        account = ledger.accounts["gradients"]
        if name == "hierarchical":
            assert link.bytes == account.bytes_between_nodes < account.bytes_wire
        else:
            # a ring sends half from node to node, an all-to-all two thirds
            parts = {"native": [1 / 2], "multi-phase": [1 / 2, 2 / 3]}.get(name, [2 / 3])
            part = account.bytes_between_nodes / account.bytes_wire
            assert min(parts) - 1e-9 <= part <= max(parts) + 1e-9, name


@pytest.mark.fresh_ranks
@pytest.mark.parametrize("throttle", [None, LinkThrottle(delay_ms=1)])
@on_ranks(2)
def test_error_of_an_overlapped_operation_is_raised(group, throttle) -> None:
    if dist.get_rank(group) == 0:
        return  # its process ends
    ledger = Ledger(ranks_per_node=2)
    ledger.traffic.throttle = throttle
    native = Native(group, ledger, "gradients")
    mean = native.start_all_reduce(torch.ones(1000), 0.5, UNIT)
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        mean.wait()


@on_ranks(1)
def test_single_rank_has_no_link(group) -> None:
    ledger = Ledger(ranks_per_node=2)
    ledger.traffic.throttle = LinkThrottle(delay_ms=60_000, bits_per_second=1)
    collective = Native(group, ledger, "gradients")
    collective.all_reduce(torch.ones(10), 1.0, UNIT)
    collective.start_all_reduce(torch.ones(10), 1.0, UNIT).wait()
    assert ledger.traffic.seconds == 0
