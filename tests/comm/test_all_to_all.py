"""Collectives over codecs, on real ranks, against the same arithmetic done serially."""

import re

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.registry import make_codec, make_method
from shardlab.codecs.wire import PayloadError
from shardlab.comm.codec_collective import Route
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from shardlab.core.errors import UserError
from tests.comm.wire import (
    CountingLink,
    exact_shard,
    is_same_everywhere,
    scatter,
    vector_of,
    vectors_of,
    wire,
)
from tests.ranks import on_ranks

RANDOM_HALF = "randomk:density=0.5"
"""random, and its payloads can be summed"""
VARIABLE = "threshold:threshold=1.0,cap=0.5"
"""its size depends on the values"""
SPECS = ["none", "bf16", "int8:group=32", "topk:density=0.1", RANDOM_HALF, VARIABLE]
N = 250
UNIT = Unit("unit")
AGREEMENT = 8
"""bytes to each other rank, before the first message of a unit"""
specs = pytest.mark.parametrize("spec", SPECS)
all_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def collective(group, spec, ranks_per_node=None, **options):
    route = Route(make_method(spec), **options)
    return make_collective(group, Ledger(ranks_per_node), "gradients", route)


def decoded(spec, vectors, part, step=0):
    """The sum that its owner computes from vectors of all ranks, on one process."""
    codec, out = make_codec(spec), torch.empty_like(vectors[0])
    keys = [MessageKey(0, step, part, rank) for rank in range(len(vectors))]
    codec.decode_sum(list(map(codec.encode, vectors, keys)), out, 1.0, keys)
    return out


@all_sizes
@on_ranks()
def test_sums_and_gathers_are_those_of_decoded_payloads(group, world_size):
    for spec in SPECS:
        ours = collective(group, spec)
        for step in range(2):
            vectors = vectors_of(world_size, world_size * N, step)
            chunks = [vector.chunk(world_size)[ours.rank] for vector in vectors]
            expected = decoded(spec, chunks, f"unit>{ours.rank}", step) * 0.5
            torch.testing.assert_close(scatter(ours, N, step, 0.5), expected)
        out, in_place = torch.empty(2, world_size * N)
        own = in_place.chunk(world_size)[ours.rank].copy_(vector_of(ours.rank, N))
        collective(group, spec).all_gather(out, own.clone(), UNIT)
        collective(group, spec).all_gather(in_place, own, UNIT)
        # the owner decodes its shard, too
        assert torch.equal(out, in_place) and is_same_everywhere(out, group), spec
        codec, key = make_codec(spec), MessageKey(0, 0, "unit<", ours.rank)
        mine = codec.decode(codec.encode(vector_of(ours.rank, N), key), N, key)
        assert torch.equal(out.chunk(world_size)[ours.rank], mine), spec


@on_ranks(2)
def test_elements_that_are_not_summed_on_the_wire_are_drawn_once(group):
    spec = "randomk:density=0.5,values=int8"
    ours, vectors = collective(group, spec), vectors_of(2, 2 * N)
    chunks = [vector.chunk(2)[ours.rank] for vector in vectors]
    assert torch.equal(scatter(ours, N), decoded(spec, chunks, f"unit>{ours.rank}"))
    with pytest.raises(UserError, match=r"draw the elements twice.*set values: fp32"):
        ours.all_reduce(vector_of(ours.rank, N), 1.0, UNIT)


@all_sizes
@on_ranks()
def test_all_reduce_gives_all_ranks_the_same_bytes(group, world_size):
    n = 4 * N - 1
    exact = vectors_of(world_size, n).sum(0) / 3
    for spec in SPECS:
        vector = vector_of(dist.get_rank(group), n)
        collective(group, spec).all_reduce(vector, 1 / 3, UNIT)
        assert is_same_everywhere(vector, group), spec
        if spec == RANDOM_HALF:
            # summed payloads are not encoded again: elements that all ranks sent are exact
            sent = vector != 0
            assert int(sent.sum()) >= n // 2 - world_size
            torch.testing.assert_close(vector[sent], exact[sent])
        elif spec in ("none", "bf16", "int8:group=32"):
            error = (vector - exact).norm() / exact.norm()
            assert error < (1e-6 if spec == "none" else 0.02)


@specs
@on_ranks(3)
def test_ledger_counts_the_bytes_that_are_sent(group, spec):
    ours, codec = collective(group, spec), make_codec(spec)
    vector = vector_of(ours.rank, 3 * N)
    one, agreed = codec.payload_bytes(N), 2 * AGREEMENT
    operations = [
        (lambda: scatter(ours, N), 2 * one + agreed, 1),
        # the exchange of `none` agrees on each type and size once
        (lambda: ours.all_gather(torch.empty(3 * N), vector[:N].clone(), UNIT), 2 * one, 1),
        (lambda: ours.all_reduce(vector, 1.0, UNIT), 4 * one, 2),
    ]
    for operation, expected, times in operations:
        ours.ledger.reset()
        ours.ledger.traffic.throttle = link = CountingLink()
        with wire() as sent:
            operation()
        assert sent.bytes == ours.account.bytes_wire
        # a variable codec may receive more than it sends
        assert link.bytes == sent.bytes or codec.variable
        assert ours.account.bytes_raw == times * 2 * 4 * N
        assert codec.variable or sent.bytes == expected
    if not codec.variable:
        account = ours.account
        content = codec.content(N, torch.empty(codec.payload_bytes(N), dtype=torch.uint8))
        assert account.metadata_bytes == 4 * content.metadata_bytes
        assert (account.elements, account.elements_sent) == (4 * N, 4 * content.elements)


@on_ranks(2)
def test_resumed_random_codec_matches_an_uninterrupted_one(group):
    def steps(ours, first, last):
        return torch.stack([scatter(ours, N, step) for step in range(first, last)])

    straight = collective(group, RANDOM_HALF, seed=7)
    before = steps(straight, 0, 5)
    saved = straight.state_dict()
    after = steps(straight, 5, 15)
    resumed = collective(group, RANDOM_HALF, seed=7)
    resumed.load_state_dict(saved)
    assert torch.equal(after, steps(resumed, 5, 15))
    # the half that is sent changes from step to step and with the seed
    starts = torch.cat([before, after])[:, 0] != 0
    assert 0 < starts.sum() < len(starts)
    other = steps(collective(group, RANDOM_HALF, seed=8), 0, 15)
    assert not torch.equal(starts, other[:, 0] != 0)


@pytest.mark.parametrize("spec", SPECS[1:])
@on_ranks(2)
def test_audit_measures_the_error_of_the_codec(group, spec):
    ours = collective(group, spec)
    scatter(ours, N)
    sent = ours.account.bytes_wire
    with ours.ledger.auditing() as audit:
        out = scatter(ours, N, scale=0.5)
    check_audit(audit, out, exact_shard(ours.rank, 2, N) / 2)
    assert ours.account.bytes_wire - sent < 2 * 4 * N, "the exact reduction is not counted"


@pytest.mark.parametrize("other", ["int8:group=128", "none", "powersgd", VARIABLE])
@on_ranks(3)
def test_ranks_that_differ_are_named_with_their_settings(group, other):
    ours = collective(group, other if dist.get_rank(group) == 2 else "int8:group=64")
    with pytest.raises(PayloadError) as caught:
        scatter(ours, N)
    expected = r"rank 0, 1: version 4, unit 'unit', codec int8:format=int8,group=64, 750 elements"
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert f"rank 2: version 4, unit 'unit', codec {make_method(other).name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@on_ranks(3)
def test_ranks_of_other_models_and_steps_are_refused(group):
    ours, rank = collective(group, "int8"), dist.get_rank(group)
    with pytest.raises(PayloadError, match="753 elements"):
        scatter(ours, N + (rank == 2))
    ours.load_state_dict({"unit": torch.tensor(7 * rank)})
    with pytest.raises(PayloadError, match=r"rank 1: .*step 7"):
        scatter(ours, N)


@pytest.mark.parametrize("spec", ["int8:group=32", RANDOM_HALF])
@on_ranks(2)
def test_audit_of_an_all_reduce_is_that_of_the_chunk_of_the_rank(group, spec):
    ours = collective(group, spec)
    total = vector_of(ours.rank, 2 * N)
    with ours.ledger.auditing() as audit:
        ours.all_reduce(total, 0.5, UNIT)
    check_audit(audit, total.chunk(2)[ours.rank], exact_shard(ours.rank, 2, N) / 2)


def check_audit(audit, out, exact):
    error = float((out - exact).square().sum())
    assert audit.exact_squared == pytest.approx(float(exact.square().sum()), rel=1e-5)
    assert audit.error_squared == pytest.approx(error, rel=1e-3)
    assert error > 0


# two levels: four ranks as two nodes of two


@on_ranks(4)
def test_audit_has_the_error_of_both_levels(group):
    ours = collective(group, "int8", between_nodes=make_codec("int8"), ranks_per_node=2)
    with ours.ledger.auditing() as audit:
        out = scatter(ours, N, scale=0.5)
    check_audit(audit, out, exact_shard(ours.rank, 4, N) / 2)


def all_operations(ours):
    rank, n = ours.rank, N * ours.world_size
    shards, whole = torch.empty(n), vector_of(rank, n - 3)
    scattered = scatter(ours, N, scale=0.25)
    ours.all_gather(shards, vector_of(rank, N), UNIT)
    ours.all_reduce(whole, 0.25, Unit("whole"))
    return scattered, shards, whole


@pytest.mark.parametrize(
    ("inside", "between", "bound"), [("none", "bf16", 0.004), ("int8", "int8", 0.015)]
)
@on_ranks(4)
def test_two_levels_agree_with_one(group, inside, between, bound):
    two = collective(group, inside, between_nodes=make_codec(between), ranks_per_node=2)
    exact, found = all_operations(collective(group, "none")), all_operations(two)
    for ours, expected in zip(found, exact, strict=True):
        assert 0 < (ours - expected).norm() / expected.norm() < bound
    _, shards, whole = found
    assert is_same_everywhere(shards, group) and is_same_everywhere(whole, group)


@on_ranks(4)
def test_bytes_between_nodes_are_counted_separately(group):
    ours = collective(group, "bf16", between_nodes=make_codec("int8"), ranks_per_node=2)
    all_operations(ours)
    gather = (torch.empty(4 * N), torch.ones(N), UNIT)
    for operation in (lambda: scatter(ours, N), lambda: ours.all_gather(*gather)):
        ours.ledger.reset()
        with wire() as sent:
            operation()
        account = ours.account
        assert (account.collectives, account.extra_collectives) == (2, 1)
        between = make_codec("int8").payload_bytes(N)
        assert sent.bytes == account.bytes_wire == 2 * 2 * N + between
        assert account.bytes_between_nodes == between
        assert account.bytes_raw == 3 * 4 * N, "the bytes of one level"


@on_ranks(4)
def test_resumed_levels_match_uninterrupted_ones(group):
    options = {"between_nodes": make_codec(RANDOM_HALF), "ranks_per_node": 2, "warmup": 1}
    ours, other = (collective(group, "qsgd", **options) for _ in range(2))
    all_operations(ours)
    other.load_state_dict(ours.state_dict())
    for _ in range(2):
        assert all(map(torch.equal, all_operations(ours), all_operations(other)))
