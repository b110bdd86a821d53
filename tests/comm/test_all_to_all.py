"""Collectives over codecs, on real ranks, against the same arithmetic done serially."""

from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.base import MessageKey
from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import message_bytes
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.collective import Native
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from tests.comm.codec_factory import Positive, RandomHalf
from tests.comm.wire import wire
from tests.ranks import run_ranks

SPECS = ["none", "bf16", "int8:group=32", "topk:density=0.1", RandomHalf(), Positive()]
CODED = SPECS[1:]
N = 250
UNIT = Unit("unit")
AGREEMENT = 8
"""bytes to each other rank, before the first message of a unit"""


def name_of(spec):
    return make_codec(spec).name


specs = pytest.mark.parametrize("spec", SPECS, ids=name_of)
coded = pytest.mark.parametrize("spec", CODED, ids=name_of)
all_sizes = pytest.mark.parametrize("world_size", [1, 2, 3, 4])


def vector_of(rank: int, n: int, step: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def collective(group, spec, feedback=False, minimum_size=0, seed=0):
    residuals = ErrorFeedback() if feedback else None
    settings = CodecSettings(residuals, minimum_size, seed)
    return AllToAllCollective(group, Ledger(), "gradients", make_codec(spec), settings)


def serial_sum(codec, chunks, part, step=0, scale=1.0):
    """What the owner of a part makes of the chunks of all ranks."""
    keys = [MessageKey(0, step, part, rank) for rank in range(len(chunks))]
    payloads = [codec.encode(chunk, key) for chunk, key in zip(chunks, keys, strict=True)]
    out = torch.empty_like(chunks[0])
    codec.decode_sum(payloads, out, scale, keys)
    return out


@all_sizes
def test_reduce_scatter_is_the_sum_of_decoded_chunks(world_size):
    def on_rank(group):
        outs = {name_of(spec): torch.empty(2, N) for spec in SPECS}
        for spec in SPECS:
            exchange = collective(group, spec)
            for step, out in enumerate(outs[name_of(spec)]):
                vector = vector_of(dist.get_rank(group), N * world_size, step)
                exchange.reduce_scatter(out, vector, 0.5, UNIT)
        return outs

    for rank, result in enumerate(run_ranks(world_size, on_rank)):
        for spec in SPECS:
            for step, out in enumerate(result[name_of(spec)]):
                vectors = [vector_of(r, N * world_size, step) for r in range(world_size)]
                chunks = [vector.chunk(world_size)[rank] for vector in vectors]
                expected = serial_sum(make_codec(spec), chunks, f"unit>{rank}", step, 0.5)
                assert torch.equal(out, expected), spec


@all_sizes
def test_all_reduce_leaves_the_same_bytes_on_all_ranks(world_size):
    n = 4 * N - 1

    def on_rank(group):
        vectors = {name_of(spec): vector_of(dist.get_rank(group), n) for spec in SPECS}
        for spec in SPECS:
            collective(group, spec).all_reduce(vectors[name_of(spec)], 1 / 3, UNIT)
        return vectors

    first, *others = run_ranks(world_size, on_rank)
    exact = sum(vector_of(rank, n) for rank in range(world_size)) / 3
    for name, reduced in first.items():
        assert all(torch.equal(reduced, other[name]) for other in others), name
        if name in ("none", "bf16", "int8"):
            error = (reduced - exact).norm() / exact.norm()
            assert error < (1e-6 if name == "none" else 0.02)
    # summed payloads are not encoded again: what all ranks chose arrives exactly
    chosen = first["random half"] != 0
    assert int(chosen.sum()) >= n // 2 - world_size
    torch.testing.assert_close(first["random half"][chosen], exact[chosen])


@all_sizes
def test_the_owner_too_uses_what_it_sent(world_size):
    def on_rank(group):
        results = {}
        for spec in SPECS:
            out, in_place = torch.empty(2, world_size * N)
            shard = vector_of(dist.get_rank(group), N)
            collective(group, spec).all_gather(out, shard, UNIT)
            own = in_place.chunk(world_size)[dist.get_rank(group)]
            own.copy_(shard)
            collective(group, spec).all_gather(in_place, own, UNIT)
            assert torch.equal(out, in_place)
            results[name_of(spec)] = out
        return results

    for result in run_ranks(world_size, on_rank):
        for spec in SPECS:
            codec, expected = make_codec(spec), []
            for rank in range(world_size):
                key = MessageKey(0, 0, "unit<", rank)
                expected.append(codec.decode(codec.encode(vector_of(rank, N), key), N, key))
            assert torch.equal(result[codec.name], torch.cat(expected))


@specs
def test_the_ledger_counts_the_bytes_that_moved(spec):
    def on_rank(group):
        rank, exchange = dist.get_rank(group), collective(group, spec)
        account = exchange.account
        counts = []
        for operation in ("reduce_scatter", "all_gather", "all_reduce"):
            exchange.ledger.reset()
            account = exchange.account
            with wire() as sent:
                vector = vector_of(rank, 3 * N)
                if operation == "all_reduce":
                    exchange.all_reduce(vector, 1.0, UNIT)
                else:
                    getattr(exchange, operation)(*_arguments(operation, vector))
            counts.append([sent.bytes, account.bytes_wire, account.bytes_raw])
        counts.append([account.metadata_bytes, account.elements, account.elements_sent])
        return {"counts": torch.tensor(counts)}

    def _arguments(operation, vector):
        if operation == "all_gather":
            return torch.empty(3 * N), vector[:N].clone(), UNIT
        return torch.empty(N), vector, 1.0, UNIT

    codec, plain = make_codec(spec), spec == "none"
    for result in run_ranks(3, on_rank):
        counts = result["counts"].tolist()
        for (moved, wired, raw), times in zip(counts[:3], (1, 1, 2), strict=True):
            assert moved == wired and raw == times * 2 * 4 * N
        if not codec.variable:
            one = 4 * N if plain else message_bytes(codec.payload_bytes(N))
            assert [row[0] for row in counts[:3]] == [2 * one + 2 * AGREEMENT, 2 * one, 4 * one]
            metadata, elements, elements_sent = counts[3]
            content = codec.content(N, torch.empty(codec.payload_bytes(N), dtype=torch.uint8))
            envelope = one - codec.payload_bytes(N)
            assert metadata == 4 * (content.metadata_bytes + envelope)
            assert [elements, elements_sent] == [4 * N, 4 * content.elements]


def test_a_variable_codec_sends_what_it_has_and_the_sizes():
    def on_rank(group):
        exchange = collective(group, Positive())
        exchange.all_gather(torch.empty(2 * N), torch.ones(N), UNIT)
        exchange.ledger.reset()
        shard = torch.zeros(N)
        shard[: 3 * dist.get_rank(group)] = 1.0
        start = perf_counter()
        exchange.all_gather(torch.empty(2 * N), shard, UNIT)
        account = exchange.account
        assert 0 < account.extra_collective_s < perf_counter() - start
        return {"n": torch.tensor([account.bytes_wire, account.extra_collectives])}

    first, second = (result["n"].tolist() for result in run_ranks(2, on_rank))
    assert first == [8 + message_bytes(0), 1]
    assert second == [8 + message_bytes(18), 1]


@pytest.mark.parametrize("spec", ["int8:group=32", "topk:density=0.1", Positive()], ids=name_of)
def test_error_feedback_conserves_every_gradient(spec):
    steps = 5

    def on_rank(group):
        rank = dist.get_rank(group)
        exchange = collective(group, spec, feedback=True)
        total = torch.zeros(N)
        for step in range(steps):
            out = torch.empty(N)
            exchange.reduce_scatter(out, vector_of(rank, 2 * N, step), 1.0, UNIT)
            total += out
        assert exchange.feedback is not None
        state = exchange.feedback.state_dict()
        return {"total": total, **{part.replace(">", "_"): r for part, r in state.items()}}

    results = run_ranks(2, on_rank)
    for owner in range(2):
        given = sum(
            vector_of(rank, 2 * N, step).chunk(2)[owner]
            for rank in range(2)
            for step in range(steps)
        )
        held_back = sum(result[f"unit_{owner}"] for result in results)
        torch.testing.assert_close(results[owner]["total"] + held_back, given, rtol=1e-4, atol=1e-4)
        assert held_back.norm() > 0


def test_random_codecs_go_on_after_a_resume_as_if_there_was_none():
    def on_rank(group):
        rank = dist.get_rank(group)

        def steps(exchange, first, last):
            outs = torch.empty(last - first, N)
            for out, step in zip(outs, range(first, last), strict=True):
                exchange.reduce_scatter(out, vector_of(rank, 2 * N, step), 1.0, UNIT)
            return outs

        straight = collective(group, RandomHalf(), seed=7)
        before = steps(straight, 0, 5)
        saved = straight.state_dict()
        after = steps(straight, 5, 15)
        resumed = collective(group, RandomHalf(), seed=7)
        resumed.load_state_dict(saved)
        again = steps(resumed, 5, 15)
        other = steps(collective(group, RandomHalf(), seed=8), 0, 15)
        return {"straight": torch.cat([before, after]), "after": after, "again": again, "o": other}

    for result in run_ranks(2, on_rank):
        assert torch.equal(result["after"], result["again"])
        # which half is chosen changes from step to step and with the seed
        starts = result["straight"][:, 0] != 0
        assert 0 < starts.sum() < len(starts)
        assert not torch.equal(starts, result["o"][:, 0] != 0)


def test_short_messages_travel_uncompressed_and_are_reported():
    def on_rank(group):
        exchange = collective(group, "topk:density=0.1", feedback=True, minimum_size=1000)
        out = torch.empty(N)
        exchange.reduce_scatter(out, vector_of(dist.get_rank(group), 2 * N), 1.0, UNIT)
        count = exchange.account.uncompressed["fewer than 1000 elements"]
        return {"out": out, "count": torch.tensor(count)}

    for rank, result in enumerate(run_ranks(2, on_rank)):
        exact = sum(vector_of(sender, 2 * N).chunk(2)[rank] for sender in range(2))
        assert torch.equal(result["out"], exact) and result["count"] == 1


def test_other_dtypes_travel_as_they_are_and_are_summed_in_float32():
    def on_rank(group):
        exchange = collective(group, "int8")
        out = torch.empty(N, dtype=torch.bfloat16)
        vector = vector_of(dist.get_rank(group), 3 * N).bfloat16()
        exchange.reduce_scatter(out, vector, 0.5, UNIT)
        account = exchange.account
        count = account.uncompressed["torch.bfloat16"]
        return {"out": out, "count": torch.tensor([count, account.bytes_wire, account.bytes_raw])}

    for rank, result in enumerate(run_ranks(3, on_rank)):
        exact = sum(vector_of(s, 3 * N).chunk(3)[rank].bfloat16().float() for s in range(3)) * 0.5
        assert torch.equal(result["out"], exact.bfloat16())
        assert result["count"].tolist() == [1, 2 * 2 * N + 2 * AGREEMENT, 2 * 2 * N]


@specs
def test_messages_may_be_empty(spec):
    if name_of(spec) == "topk":
        spec = "bf16"

    def on_rank(group):
        exchange, empty = collective(group, spec), torch.empty(0)
        exchange.reduce_scatter(empty, empty, 1.0, UNIT)
        exchange.all_gather(empty, empty, UNIT)
        exchange.all_reduce(empty, 1.0, UNIT)
        one = torch.ones(1)
        exchange.all_reduce(one, 1.0, UNIT)
        return {"one": one}

    first, second = run_ranks(2, on_rank)
    assert torch.equal(first["one"], second["one"])


def test_native_and_exchange_agree_without_a_codec():
    def on_rank(group):
        rank = dist.get_rank(group)
        native = Native(group, Ledger(), "gradients")
        ours = collective(group, "none")
        results = {}
        for name, c in {"native": native, "ours": ours}.items():
            out, vector, gathered = torch.empty(N), vector_of(rank, 2 * N), torch.empty(2 * N)
            c.reduce_scatter(out, vector, 0.5, UNIT)
            assert torch.equal(vector, vector_of(rank, 2 * N))
            c.all_gather(gathered, out, UNIT)
            whole = vector_of(rank, 2 * N)
            c.all_reduce(whole, 0.5, Unit("unit2"))
            results |= {f"{name}_rs": out, f"{name}_ar": whole, f"{name}_ag": gathered}
        wire = [native.account.bytes_wire, ours.account.bytes_wire]
        return {**results, "wire": torch.tensor(wire)}

    for result in run_ranks(2, on_rank):
        for operation in ("rs", "ar", "ag"):
            assert torch.equal(result[f"native_{operation}"], result[f"ours_{operation}"])
        # gloo's reduce-scatter moves twice what is needed: 2 + 1 + 2 against 1 + 1 + 2 shards
        assert result["wire"].tolist() == [5 * 4 * N, 4 * 4 * N + 2 * AGREEMENT]


@coded
def test_the_audit_measures_the_error_of_the_codec(spec):
    def on_rank(group):
        exchange = collective(group, spec)
        out = torch.empty(N)
        exchange.reduce_scatter(out, vector_of(dist.get_rank(group), 2 * N), 0.5, UNIT)
        wired = exchange.account.bytes_wire
        with exchange.ledger.auditing() as audit:
            exchange.reduce_scatter(out, vector_of(dist.get_rank(group), 2 * N), 0.5, UNIT)
        sums = torch.tensor([audit.error_squared, audit.exact_squared])
        return {"out": out, "sums": sums, "more": torch.tensor(exchange.account.bytes_wire - wired)}

    for rank, result in enumerate(run_ranks(2, on_rank)):
        exact = sum(vector_of(sender, 2 * N).chunk(2)[rank] for sender in range(2)) / 2
        torch.testing.assert_close(result["sums"][1], exact.square().sum())
        error = (result["out"] - exact).square().sum()
        torch.testing.assert_close(result["sums"][0], error, rtol=1e-3, atol=1e-9)
        assert result["sums"][0] > 0
        assert result["more"] < 2 * 4 * N, "the exact reduction is not counted"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("spec", ["none", "int8"])
def test_results_that_are_not_finite_are_counted_where_they_are(spec, value):
    def on_rank(group):
        exchange = collective(group, spec)
        vector, out = torch.ones(2 * N), torch.empty(N)
        exchange.reduce_scatter(out, vector, 1.0, UNIT)
        # the sum of finite elements may overflow
        huge = torch.full((2 * N,), 1e38 * (dist.get_rank(group) == 0))
        if spec == "none":
            exchange.reduce_scatter(out, huge, 1.0, UNIT)
        before = exchange.account.not_finite
        vector[3] = value if dist.get_rank(group) == 1 else 1.0
        exchange.reduce_scatter(out, vector, 1.0, UNIT)
        return {"count": torch.tensor([before, exchange.account.not_finite])}

    owner, other = run_ranks(2, on_rank)
    assert owner["count"].tolist() == [0, 1] and other["count"].tolist() == [0, 0]


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_any_scale_multiplies_the_sum(operation):
    scales = (0.5, 1.0, 2.0, -3.0)

    def on_rank(group):
        results = {}
        for name in ("native", "none", "int8"):
            ours = collective(group, name if name != "native" else "none")
            if name == "native":
                ours = Native(group, Ledger(), "gradients")
            for scale in scales:
                vector, out = vector_of(dist.get_rank(group), 2 * N), torch.empty(N)
                if operation == "reduce_scatter":
                    ours.reduce_scatter(out, vector, scale, UNIT)
                else:
                    ours.all_reduce(vector, scale, UNIT)
                results[f"{name} {scale}"] = out if operation == "reduce_scatter" else vector
        return results

    for result in run_ranks(2, on_rank):
        for name in ("native", "none", "int8"):
            for scale in scales:
                expected = scale * result[f"{name} 1.0"]
                # an all-reduce encodes the scaled sums once more
                atol = 0.2 if name == "int8" and operation == "all_reduce" else 1e-5
                torch.testing.assert_close(
                    result[f"{name} {scale}"], expected, rtol=1e-5, atol=atol
                )
