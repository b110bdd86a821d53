"""Collectives over codecs, on real ranks, against the same arithmetic done serially."""

import re

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.base import MessageKey, Unit
from shardlab.codecs.registry import make_codec, make_method
from shardlab.codecs.wire import PayloadError
from shardlab.comm.all_to_all import AllToAllCollective, LinearNative
from shardlab.comm.attach import Route, make_collective
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.emulated_link import LinkThrottle
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from tests.comm.wire import is_same_everywhere, vector_of, vectors_of, wire
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


def name_of(spec):
    return make_codec(spec).name


specs = pytest.mark.parametrize("spec", SPECS, ids=name_of)
compressing = pytest.mark.parametrize("spec", SPECS[1:], ids=name_of)
all_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def collective(group, spec, feedback=False, minimum_size=0, seed=0, route=AllToAllCollective):
    settings = CodecSettings(ErrorFeedback() if feedback else None, minimum_size, seed)
    return route(group, Ledger(), "gradients", make_codec(spec), settings)


def scatter(ours, step=0, scale=1.0):
    """The shard of a reduce-scatter of the vectors of all ranks."""
    out = torch.empty(N)
    ours.reduce_scatter(out, vector_of(ours.rank, ours.world_size * N, step), scale, UNIT)
    return out


def exact_shard(rank, world_size, step=0):
    return vectors_of(world_size, world_size * N, step).sum(0).chunk(world_size)[rank]


def serial_sum(codec, chunks, part, step=0, scale=1.0):
    """Part that its owner computes from the chunks of all ranks."""
    keys = [MessageKey(0, step, part, rank) for rank in range(len(chunks))]
    payloads = [codec.encode(chunk, key) for chunk, key in zip(chunks, keys, strict=True)]
    out = torch.empty_like(chunks[0])
    codec.decode_sum(payloads, out, scale, keys)
    return out


@all_sizes
@on_ranks()
def test_reduce_scatter_is_the_sum_of_decoded_chunks(group, world_size):
    for spec in SPECS:
        ours = collective(group, spec)
        for step in range(2):
            vectors = vectors_of(world_size, world_size * N, step)
            chunks = [vector.chunk(world_size)[ours.rank] for vector in vectors]
            expected = serial_sum(make_codec(spec), chunks, f"unit>{ours.rank}", step, 0.5)
            assert torch.equal(scatter(ours, step, 0.5), expected), spec


@all_sizes
@on_ranks()
def test_all_reduce_gives_all_ranks_the_same_bytes(group, world_size):
    n = 4 * N - 1
    exact = vectors_of(world_size, n).sum(0) / 3
    for spec in SPECS:
        vector, name = vector_of(dist.get_rank(group), n), name_of(spec)
        collective(group, spec).all_reduce(vector, 1 / 3, UNIT)
        assert is_same_everywhere(vector, group), spec
        if name in ("none", "bf16", "int8"):
            error = (vector - exact).norm() / exact.norm()
            assert error < (1e-6 if name == "none" else 0.02)
        if name == "randomk":
            # summed payloads are not encoded again: elements that all ranks sent are exact
            sent = vector != 0
            assert int(sent.sum()) >= n // 2 - world_size
            torch.testing.assert_close(vector[sent], exact[sent])


@all_sizes
@on_ranks()
def test_all_gather_decodes_the_shard_of_the_owner_too(group, world_size):
    rank = dist.get_rank(group)
    for spec in SPECS:
        codec, expected = make_codec(spec), []
        for sender in range(world_size):
            key = MessageKey(0, 0, "unit<", sender)
            expected.append(codec.decode(codec.encode(vector_of(sender, N), key), N, key))
        out, in_place = torch.empty(2, world_size * N)
        collective(group, spec).all_gather(out, vector_of(rank, N), UNIT)
        own = in_place.chunk(world_size)[rank]
        own.copy_(vector_of(rank, N))
        collective(group, spec).all_gather(in_place, own, UNIT)
        assert torch.equal(out, in_place) and torch.equal(out, torch.cat(expected)), spec


class CountingLink(LinkThrottle):
    """A link without limits that counts what it carries."""

    def __init__(self):
        super().__init__(0.0)
        self.bytes = 0.0

    def carry(self, nbytes):
        self.bytes += nbytes
        return super().carry(nbytes)


@specs
@on_ranks(3)
def test_ledger_counts_the_bytes_that_are_sent(group, spec):
    ours, codec = collective(group, spec), make_codec(spec)
    vector = vector_of(ours.rank, 3 * N)
    one = 4 * N if spec == "none" else codec.payload_bytes(N)
    operations = {
        lambda: scatter(ours): 2 * one + 2 * AGREEMENT,
        lambda: ours.all_gather(torch.empty(3 * N), vector[:N].clone(), UNIT): 2 * one,
        lambda: ours.all_reduce(vector, 1.0, UNIT): 4 * one,
    }
    for times, (operation, expected) in zip((1, 1, 2), operations.items(), strict=True):
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
        return torch.stack([scatter(ours, step) for step in range(first, last)])

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


@on_ranks(2)
def test_short_messages_are_sent_uncompressed_and_reported(group):
    ours = collective(group, "topk:density=0.1", feedback=True, minimum_size=1000)
    assert torch.equal(scatter(ours), exact_shard(ours.rank, 2))
    assert ours.account.uncompressed == {"fewer than 1000 elements": 1}


@compressing
@on_ranks(2)
def test_audit_measures_the_error_of_the_codec(group, spec):
    ours = collective(group, spec)
    scatter(ours)
    sent = ours.account.bytes_wire
    with ours.ledger.auditing() as audit:
        out = scatter(ours, scale=0.5)
    exact = exact_shard(ours.rank, 2) / 2
    error = float((out - exact).square().sum())
    assert audit.exact_squared == pytest.approx(float(exact.square().sum()), rel=1e-5)
    assert audit.error_squared == pytest.approx(error, rel=1e-3, abs=1e-9)
    assert audit.error_squared > 0
    assert ours.account.bytes_wire - sent < 2 * 4 * N, "the exact reduction is not counted"


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("feedback", [False, True])
@on_ranks()
def test_routes_of_linear_codecs_agree(group, world_size, feedback):
    results = []
    for route in (AllToAllCollective, LinearNative):
        ours, found = collective(group, RANDOM_HALF, feedback, route=route), []
        for step in range(3):
            whole = vector_of(ours.rank, world_size * N, step)[:-1]
            ours.all_reduce(whole, 0.5, Unit("whole"))
            found += [scatter(ours, step, 0.5), whole]
        results.append(torch.cat(found))
    exchanged, native = results
    torch.testing.assert_close(exchanged, native, rtol=1e-6, atol=1e-6)
    assert torch.equal(exchanged == 0, native == 0) and native.any()


@on_ranks(2)
def test_native_route_of_linear_codecs_counts_the_bytes_of_gloo(group):
    ours = collective(group, RANDOM_HALF, route=LinearNative)
    scatter(ours)
    counts, link = [], CountingLink()
    ours.ledger.traffic.throttle = link
    for operation in (scatter, lambda ours: ours.all_reduce(torch.ones(2 * N), 1.0, UNIT)):
        ours.ledger.reset()
        operation(ours)
        account = ours.account
        counts.append(
            [account.bytes_wire, account.bytes_raw, account.elements, account.elements_sent]
        )
    padded = 4 * (N // 2) + 4 * (N // 2) % 8
    # gloo reduces and scatters by an all-reduce
    assert counts == [[2 * padded, 4 * N, 2 * N, N], [2 * padded, 8 * N, 2 * N, N]]
    assert link.bytes == 4 * padded


@pytest.mark.parametrize(
    "other",
    ["int8:group=128", "bf16", "none", "powersgd", VARIABLE],
)
@on_ranks(3)
def test_ranks_that_differ_are_named_with_their_settings(group, other):
    route = Route(make_method(other if dist.get_rank(group) == 2 else "int8:group=64"))
    ours = make_collective(group, Ledger(), "gradients", route)
    with pytest.raises(PayloadError) as caught:
        ours.reduce_scatter(torch.empty(N), torch.rand(3 * N), 1.0, UNIT)
    expected = r"rank 0, 1: version 4, unit 'unit', codec int8:format=int8,group=64, 750 elements"
    assert re.search(expected, str(caught.value)), str(caught.value)
    assert f"rank 2: version 4, unit 'unit', codec {make_method(other).name}" in str(caught.value)
    assert "\n" not in str(caught.value)


@on_ranks(3)
def test_ranks_of_other_models_and_steps_are_refused(group):
    ours, rank = collective(group, "int8"), dist.get_rank(group)
    n = N + (rank == 2)
    with pytest.raises(PayloadError, match="753 elements"):
        ours.reduce_scatter(torch.empty(n), torch.rand(3 * n), 1.0, UNIT)
    ours.load_state_dict({"unit": torch.tensor(7 * rank)})
    with pytest.raises(PayloadError, match=r"rank 1: .*step 7"):
        scatter(ours)
