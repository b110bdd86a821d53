"""Payloads that can be summed give on the native route what they give on the exchange route."""

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.comm.all_to_all import AllToAllCollective, LinearNative
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from tests.comm.codec_factory import RandomHalf
from tests.ranks import on_ranks, run_ranks

N = 250
UNIT = Unit("unit")
PAYLOAD = 4 * (N // 2)


def vector_of(rank, n, step=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def make(route, group, feedback=False, minimum_size=0):
    residuals = ErrorFeedback() if feedback else None
    return route(group, Ledger(), "gradients", RandomHalf(), CodecSettings(residuals, minimum_size))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("feedback", [False, True])
def test_both_routes_reduce_to_the_same(world_size, feedback):
    def on_rank(group):
        rank, results = dist.get_rank(group), {}
        for route in (AllToAllCollective, LinearNative):
            collective = make(route, group, feedback)
            scattered, whole = torch.empty(3, N), torch.empty(3, world_size * N - 1)
            for step in range(3):
                vector = vector_of(rank, world_size * N, step)
                collective.reduce_scatter(scattered[step], vector, 0.5, UNIT)
                whole[step] = vector[:-1]
                collective.all_reduce(whole[step], 0.5, Unit("whole"))
            results |= {f"{route.__name__} rs": scattered, f"{route.__name__} ar": whole}
        return results

    for result in run_ranks(world_size, on_rank):
        for operation in ("rs", "ar"):
            exchanged, summed = (
                result[f"{r} {operation}"] for r in ("AllToAllCollective", "LinearNative")
            )
            torch.testing.assert_close(exchanged, summed, rtol=1e-6, atol=1e-6)
            assert torch.equal(exchanged == 0, summed == 0) and summed.any()


def test_the_native_route_counts_what_gloo_sends():
    def on_rank(group):
        collective = make(LinearNative, group)
        collective.reduce_scatter(torch.empty(N), torch.ones(2 * N), 1.0, UNIT)
        collective.ledger.reset()
        collective.reduce_scatter(torch.empty(N), torch.ones(2 * N), 1.0, UNIT)
        first = collective.account
        collective.ledger.reset()
        collective.all_reduce(torch.ones(2 * N), 1.0, UNIT)
        second = collective.account
        return {
            "counts": torch.tensor(
                [[a.bytes_wire, a.bytes_raw, a.elements, a.elements_sent] for a in (first, second)]
            )
        }

    padded = PAYLOAD + -PAYLOAD % 8
    for result in run_ranks(2, on_rank):
        scattered, whole = result["counts"].tolist()
        # gloo reduces and scatters by an all-reduce
        assert scattered == [2 * padded, 4 * N, 2 * N, N]
        assert whole == [2 * padded, 8 * N, 2 * N, N]


def test_what_the_codec_does_not_take_goes_the_native_way():
    def on_rank(group):
        collective = make(LinearNative, group, minimum_size=10_000)
        out, vector = torch.empty(N), vector_of(dist.get_rank(group), 2 * N)
        collective.reduce_scatter(out, vector, 1.0, UNIT)
        collective.all_reduce(vector, 1.0, UNIT)
        reported = collective.account.uncompressed["fewer than 10000 elements"]
        return {"out": out, "vector": vector, "reported": torch.tensor(reported)}

    exact = vector_of(0, 2 * N) + vector_of(1, 2 * N)
    for rank, result in enumerate(run_ranks(2, on_rank)):
        assert torch.equal(result["out"], exact.chunk(2)[rank])
        assert torch.equal(result["vector"], exact) and result["reported"] == 2


def test_the_audit_compares_what_the_native_route_made():
    def on_rank(group):
        collective, rank = make(LinearNative, group), dist.get_rank(group)
        with collective.ledger.auditing() as audit:
            collective.reduce_scatter(torch.empty(N), vector_of(rank, 2 * N), 1.0, UNIT)
            collective.all_reduce(vector_of(rank, 2 * N), 1.0, UNIT)
        return {"share": torch.tensor(audit.error_squared / audit.exact_squared)}

    assert all(0.3 < result["share"] < 0.7 for result in run_ranks(2, on_rank))


@on_ranks(1)
def test_payloads_that_cannot_be_summed_are_refused(group) -> None:
    with pytest.raises(ValueError, match="int8' cannot be summed"):
        LinearNative(group, Ledger(), "gradients", make_codec("int8"))
