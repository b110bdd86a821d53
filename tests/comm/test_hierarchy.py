"""Two levels of exchange against one, on four ranks as two nodes of two."""

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import message_bytes
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.codec_collective import CodecSettings
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.hierarchy import HierarchicalCollective
from shardlab.comm.ledger import Ledger
from shardlab.core.errors import UserError
from tests.comm.wire import wire
from tests.ranks import on_ranks, run_ranks

N, W, L = 256, 4, 2
UNIT = Unit("unit")


def vector_of(rank, n, step=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(100 * step + rank))


def two_level(group, inside, between, feedback=False, ranks_per_node=L):
    codecs = make_codec(inside), make_codec(between)
    settings = CodecSettings(ErrorFeedback() if feedback else None)
    return HierarchicalCollective(group, Ledger(), "gradients", *codecs, ranks_per_node, settings)


def all_operations(collective, rank):
    n = N * collective.world_size
    scattered, gathered = torch.empty(N), torch.empty(n)
    collective.reduce_scatter(scattered, vector_of(rank, n), 0.25, UNIT)
    collective.all_gather(gathered, vector_of(rank, N), UNIT)
    whole = vector_of(rank, n - 3)
    collective.all_reduce(whole, 0.25, Unit("whole"))
    return {"scattered": scattered, "gathered": gathered, "whole": whole}


@pytest.mark.parametrize(
    ("levels", "bound"),
    [(("none", "none"), 1e-6), (("int8", "bf16"), 0.012), (("int8", "int8"), 0.015)],
    ids=str,
)
def test_two_levels_agree_with_one(levels, bound):
    def on_rank(group):
        rank = dist.get_rank(group)
        exact = AllToAllCollective(group, Ledger(), "gradients", make_codec("none"))
        expected = all_operations(exact, rank)
        found = all_operations(two_level(group, *levels), rank)
        return found | {f"exact {key}": value for key, value in expected.items()}

    results = run_ranks(W, on_rank)
    for result in results:
        for key in ("scattered", "gathered", "whole"):
            error = (result[key] - result[f"exact {key}"]).norm() / result[f"exact {key}"].norm()
            assert error < bound, key
        for key in ("gathered", "whole"):
            assert torch.equal(result[key], results[0][key])
    if levels == ("none", "none"):
        # up to the order of sums: nothing is added up when shards are gathered
        assert torch.equal(results[0]["gathered"], results[0]["exact gathered"])


@pytest.mark.parametrize("ranks_per_node", [1, 3])
@on_ranks(3)
def test_one_node_and_nodes_of_one_rank_are_cases_of_it(group, ranks_per_node) -> None:
    rank = dist.get_rank(group)
    levels = two_level(group, "none", "none", ranks_per_node=ranks_per_node)
    one = AllToAllCollective(group, Ledger(), "gradients", make_codec("none"))
    found, expected = all_operations(levels, rank), all_operations(one, rank)
    assert all(torch.equal(found[key], expected[key]) for key in found)


def test_bytes_between_nodes_are_counted_apart():
    def on_rank(group):
        collective, rank = two_level(group, "bf16", "int8"), dist.get_rank(group)
        all_operations(collective, rank)
        counts = []
        for operation in ("reduce_scatter", "all_gather"):
            collective.ledger.reset()
            with wire() as sent:
                if operation == "reduce_scatter":
                    collective.reduce_scatter(torch.empty(N), torch.ones(W * N), 1.0, UNIT)
                else:
                    collective.all_gather(torch.empty(W * N), torch.ones(N), UNIT)
            account = collective.account
            assert (account.collectives, account.extra_collectives) == (2, 1)
            assert account.extra_collective_s > 0
            wired, between = account.bytes_wire, account.bytes_between_nodes
            counts.append([sent.bytes, wired, between, account.bytes_raw])
        return {"counts": torch.tensor(counts)}

    inside = message_bytes(make_codec("bf16").payload_bytes(2 * N))
    between = message_bytes(make_codec("int8").payload_bytes(N))
    for result in run_ranks(W, on_rank):
        for moved, wired, across, raw in result["counts"].tolist():
            assert moved == wired == inside + between
            assert across == between
            assert raw == 3 * 4 * N, "what one level would have to send"


def test_error_feedback_of_both_levels_conserves_every_gradient():
    steps = 6

    def on_rank(group):
        collective = two_level(group, "int8", "topk:density=0.2", feedback=True)
        total = torch.zeros(N)
        for step in range(steps):
            out = torch.empty(N)
            vector = vector_of(dist.get_rank(group), W * N, step)
            collective.reduce_scatter(out, vector, 1.0, UNIT)
            total += out
        state = collective.inside.feedback.state_dict()
        steps_of = {key.replace("@", " at "): s for key, s in collective.state_dict().items()}
        residuals = {key.replace(">", " to "): value for key, value in state.items()}
        return {"total": total} | residuals | {f"{key} steps": s for key, s in steps_of.items()}

    results = run_ranks(W, on_rank)
    assert {int(results[0][f"unit{level} steps"]) for level in ("", " at nodes")} == {steps}
    for owner in range(W):
        given = sum(
            vector_of(rank, W * N, step).chunk(W)[owner]
            for rank in range(W)
            for step in range(steps)
        )
        node, place = divmod(owner, L)
        # of every rank for this place, of every rank of this place for this node
        inside = sum(result[f"unit to {place}"].chunk(2)[node] for result in results)
        across = sum(result[f"unit@nodes to {node}"] for result in results[place::L])
        total = results[owner]["total"] + inside + across
        torch.testing.assert_close(total, given, rtol=1e-4, atol=1e-4)


def test_the_audit_compares_both_levels_with_the_exact_sum():
    def on_rank(group):
        collective = two_level(group, "int8", "bf16")
        out, rank = torch.empty(N), dist.get_rank(group)
        with collective.ledger.auditing() as audit:
            collective.reduce_scatter(out, vector_of(rank, W * N), 0.25, UNIT)
        return {"out": out, "sums": torch.tensor([audit.error_squared, audit.exact_squared])}

    for rank, result in enumerate(run_ranks(W, on_rank)):
        exact = sum(vector_of(sender, W * N).chunk(W)[rank] for sender in range(W)) / 4
        error = (result["out"] - exact).square().sum()
        torch.testing.assert_close(result["sums"][0], error, rtol=1e-3, atol=1e-9)
        torch.testing.assert_close(result["sums"][1], exact.square().sum())


def test_steps_of_both_levels_are_saved_and_taken_back():
    def on_rank(group):
        collective = two_level(group, "int8", "bf16")
        vector = vector_of(dist.get_rank(group), W * N)
        collective.reduce_scatter(torch.empty(N), vector, 1.0, UNIT)
        fresh = two_level(group, "int8", "bf16")
        fresh.load_state_dict(collective.state_dict())
        for each in (collective, fresh):
            each.reduce_scatter(torch.empty(N), vector, 1.0, UNIT)
        for each in (collective, fresh):
            steps = {unit: int(step) for unit, step in each.state_dict().items()}
            assert steps == {"unit": 2, "unit@nodes": 2}
        return {}

    run_ranks(W, on_rank)


def test_ranks_that_are_not_whole_nodes_are_refused():
    def on_rank(group):
        two_level(group, "int8", "bf16", ranks_per_node=2)
        return {}

    with pytest.raises(UserError, match="3 ranks are not whole nodes of 2"):
        run_ranks(3, on_rank)
