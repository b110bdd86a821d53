"""Two levels of exchange against one, on four ranks as two nodes of two."""

import pytest
import torch

from shardlab.codecs.base import Unit
from shardlab.codecs.registry import make_codec
from shardlab.comm.all_to_all import AllToAllCollective, HierarchicalCollective
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from tests.comm.wire import is_same_everywhere, vector_of, wire
from tests.ranks import on_ranks

N, W, L = 256, 4, 2
UNIT = Unit("unit")


def two_level(group, inside, between, feedback=False, ranks_per_node=L):
    codecs = make_codec(inside), make_codec(between)
    settings = CodecSettings(ErrorFeedback() if feedback else None)
    return HierarchicalCollective(group, Ledger(), "gradients", *codecs, ranks_per_node, settings)


def one_level(group):
    return AllToAllCollective(group, Ledger(), "gradients", make_codec("none"))


def all_operations(collective):
    rank, n = collective.rank, N * collective.world_size
    scattered, shards = torch.empty(N), torch.empty(n)
    collective.reduce_scatter(scattered, vector_of(rank, n), 0.25, UNIT)
    collective.all_gather(shards, vector_of(rank, N), UNIT)
    whole = vector_of(rank, n - 3)
    collective.all_reduce(whole, 0.25, Unit("whole"))
    return scattered, shards, whole


@pytest.mark.parametrize(
    ("levels", "bound"),
    [(("none", "none"), 1e-6), (("int8", "bf16"), 0.012), (("int8", "int8"), 0.015)],
    ids=str,
)
@on_ranks(W)
def test_two_levels_agree_with_one(group, levels, bound):
    exact, found = all_operations(one_level(group)), all_operations(two_level(group, *levels))
    for ours, expected in zip(found, exact, strict=True):
        assert (ours - expected).norm() / expected.norm() < bound
    _, shards, whole = found
    assert is_same_everywhere(shards, group) and is_same_everywhere(whole, group)
    # nothing is summed when shards are gathered, so no order of sums makes a difference
    assert levels != ("none", "none") or torch.equal(shards, exact[1])


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
@on_ranks(W)
def test_bytes_between_nodes_are_counted_separately(group, operation):
    collective = two_level(group, "bf16", "int8")
    all_operations(collective)
    collective.ledger.reset()
    with wire() as sent:
        if operation == "reduce_scatter":
            collective.reduce_scatter(torch.empty(N), torch.ones(W * N), 1.0, UNIT)
        else:
            collective.all_gather(torch.empty(W * N), torch.ones(N), UNIT)
    account = collective.account
    assert (account.collectives, account.extra_collectives) == (2, 1)
    assert account.extra_collective_s > 0
    inside = make_codec("bf16").payload_bytes(2 * N)
    between = make_codec("int8").payload_bytes(N)
    assert sent.bytes == account.bytes_wire == inside + between
    assert account.bytes_between_nodes == between
    assert account.bytes_raw == 3 * 4 * N, "the bytes of one level"
