"""Collectives over codecs, on real ranks, against the same arithmetic done serially."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Native
from shardlab.comm.exchange import Exchange
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger

SPECS = ["none", "bf16", "int8:group=32", "topk:density=0.1"]
N = 300


def vector_of(rank: int, n: int, step: int = 0) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def collective(group, spec, feedback=False, minimum_size=0):
    residuals = ErrorFeedback() if feedback else None
    return Exchange(group, Ledger(), "gradients", make_codec(spec), residuals, minimum_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_reduce_scatter_is_the_sum_of_decoded_chunks(spec, world_size):
    def on_rank(group):
        out = torch.empty(N)
        vector = vector_of(dist.get_rank(group), N * world_size)
        collective(group, spec).reduce_scatter(out, vector, 0.5, Unit("unit"))
        return {"out": out}

    codec = make_codec(spec)
    for rank, result in enumerate(run_ranks(world_size, on_rank)):
        expected = torch.zeros(N)
        for sender in range(world_size):
            chunk = vector_of(sender, N * world_size).chunk(world_size)[rank]
            codec.decode_add(codec.encode(chunk), expected, 0.5)
        assert torch.equal(result["out"], expected)


@pytest.mark.parametrize("spec", SPECS)
def test_all_reduce_leaves_the_same_bytes_on_all_ranks(spec):
    def on_rank(group):
        vector = vector_of(dist.get_rank(group), 1001)
        collective(group, spec).all_reduce(vector, 1 / 3, Unit("unit"))
        return {"out": vector}

    first, *others = run_ranks(3, on_rank)
    assert all(torch.equal(first["out"], other["out"]) for other in others)
    if spec == "none":
        exact = sum(vector_of(rank, 1001) for rank in range(3)) / 3
        torch.testing.assert_close(first["out"], exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("spec", SPECS)
def test_the_owner_too_uses_what_it_sent(spec):
    def on_rank(group):
        out = torch.empty(2 * N)
        collective(group, spec).all_gather(out, vector_of(dist.get_rank(group), N), Unit("unit"))
        return {"out": out}

    codec = make_codec(spec)
    expected = torch.cat([codec.decode(codec.encode(vector_of(r, N)), N) for r in range(2)])
    for result in run_ranks(2, on_rank):
        assert torch.equal(result["out"], expected)


@pytest.mark.parametrize("spec", SPECS)
def test_the_ledger_counts_the_bytes_that_moved(spec):
    def on_rank(group):
        moved = torch.zeros(1)
        original = dist.all_to_all_single

        def counting(output, given, out_sizes, in_sizes, group):
            rank = dist.get_rank(group)
            moved.add_(given.nbytes - in_sizes[rank] * given.element_size())
            return original(output, given, out_sizes, in_sizes, group=group)

        dist.all_to_all_single = counting
        exchange = collective(group, spec)
        out = torch.empty(N)
        exchange.reduce_scatter(out, vector_of(dist.get_rank(group), 3 * N), 1.0, Unit("unit"))
        account = exchange.account
        return {"moved": moved, "wire": torch.tensor([account.bytes_wire, account.bytes_raw])}

    for result in run_ranks(3, on_rank):
        wire, raw = result["wire"].tolist()
        assert wire == result["moved"].item() == 2 * make_codec(spec).payload_bytes(N)
        assert raw == 2 * 4 * N


@pytest.mark.parametrize("spec", ["int8:group=32", "topk:density=0.1"])
def test_error_feedback_conserves_every_gradient(spec):
    steps = 5

    def on_rank(group):
        rank = dist.get_rank(group)
        exchange = collective(group, spec, feedback=True)
        total = torch.zeros(N)
        for step in range(steps):
            out = torch.empty(N)
            exchange.reduce_scatter(out, vector_of(rank, 2 * N, step), 1.0, Unit("unit"))
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


def test_short_messages_travel_uncompressed_and_are_reported():
    def on_rank(group):
        exchange = collective(group, "topk:density=0.1", feedback=True, minimum_size=1000)
        out = torch.empty(N)
        exchange.reduce_scatter(out, vector_of(dist.get_rank(group), 2 * N), 1.0, Unit("unit"))
        count = exchange.account.uncompressed["fewer than 1000 elements"]
        return {"out": out, "count": torch.tensor(count)}

    for rank, result in enumerate(run_ranks(2, on_rank)):
        exact = sum(vector_of(sender, 2 * N).chunk(2)[rank] for sender in range(2))
        assert torch.equal(result["out"], exact) and result["count"] == 1


def test_native_and_exchange_agree_without_a_codec():
    def on_rank(group):
        rank = dist.get_rank(group)
        native = Native(group, Ledger(), "gradients")
        ours = collective(group, "none")
        results = {}
        for name, c in {"native": native, "ours": ours}.items():
            out, vector = torch.empty(N), vector_of(rank, 2 * N)
            c.reduce_scatter(out, vector, 0.5, Unit("unit"))
            whole = vector_of(rank, 2 * N)
            c.all_reduce(whole, 0.5, Unit("unit2"))
            results |= {f"{name}_rs": out, f"{name}_ar": whole}
        wire = [native.account.bytes_wire, ours.account.bytes_wire]
        return {**results, "wire": torch.tensor(wire)}

    for result in run_ranks(2, on_rank):
        assert torch.equal(result["native_rs"], result["ours_rs"])
        assert torch.equal(result["native_ar"], result["ours_ar"])
        # gloo's reduce-scatter moves twice what is needed: 2 + 2 against 1 + 2 units
        assert result["wire"].tolist() == [4 * 4 * N, 3 * 4 * N]


def test_the_audit_measures_the_error_of_the_codec():
    def on_rank(group):
        exchange = collective(group, "int8:group=32")
        out = torch.empty(N)
        with exchange.ledger.auditing() as audit:
            exchange.reduce_scatter(out, vector_of(dist.get_rank(group), 2 * N), 0.5, Unit("unit"))
        return {"out": out, "sums": torch.tensor([audit.error_squared, audit.exact_squared])}

    for rank, result in enumerate(run_ranks(2, on_rank)):
        exact = sum(vector_of(sender, 2 * N).chunk(2)[rank] for sender in range(2)) / 2
        error = (result["out"] - exact).square().sum()
        torch.testing.assert_close(result["sums"][0], error, rtol=1e-3, atol=1e-9)
        assert 0 < result["sums"][0] < 1e-3 * result["sums"][1]
