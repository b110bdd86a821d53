"""What is excluded arrives exactly, the rest through the codec, and the ledger tells them apart."""

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Block, Unit
from shardlab.comm.build import Route, make_collective
from shardlab.comm.ledger import Ledger
from shardlab.comm.names import matching
from shardlab.comm.residuals import Layout
from shardlab.core.errors import UserError
from tests.comm.wrapped_models import WRAPPERS, backward, full, gradients_after
from tests.ranks import on_ranks, run_ranks

UNIT = Unit("unit", (Block("a", 5, 3), Block("b", 4, 1), Block("c", 3, 7), Block("d", 6, 2)))


def whole(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(b.rows, b.columns, generator=generator) for b in UNIT.blocks]


def scattered(blocks: list[torch.Tensor], world_size: int) -> torch.Tensor:
    """As `fully_shard` lays gradients out."""
    flat = torch.empty(world_size, sum(UNIT.chunk_sizes(world_size)))
    return torch._chunk_cat(blocks, 0, world_size, out=flat).flatten()


def route(excluded=(), warmup=0, spec="int8:group=8"):
    return Route(make_codec(spec), excluded=frozenset(excluded), warmup=warmup)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("excluded", [["a"], ["b", "d"], ["a", "b", "c"], ["a", "b", "c", "d"]])
def test_excluded_blocks_arrive_exactly_and_the_rest_through_the_codec(excluded, world_size):
    def on_rank(group):
        ledger, rank = Ledger(), dist.get_rank(group)
        given = scattered(whole(rank), world_size)
        out = torch.empty(given.numel() // world_size)
        collective = make_collective(group, ledger, "gradients", route(excluded))
        collective.reduce_scatter(out, given, 1.0, UNIT)
        total = torch.cat([block.flatten() for block in whole(rank)])
        collective.all_reduce(total, 1.0, UNIT)
        account = ledger.accounts["gradients"]
        assert account.uncompressed == {"excluded by name": 2}
        return {"scattered": out, "whole": total}

    exact = [sum(each) for each in zip(*map(whole, range(world_size)), strict=True)]
    expected = scattered(exact, world_size).chunk(world_size)
    results = run_ranks(world_size, on_rank)
    for rank, result in enumerate(results):
        found = result["scattered"].split(UNIT.chunk_sizes(world_size))
        wanted = expected[rank].split(UNIT.chunk_sizes(world_size))
        _judge(found, wanted, excluded)
        assert torch.equal(result["whole"], results[0]["whole"])
        sizes = [block.numel() for block in exact]
        _judge(result["whole"].split(sizes), [block.flatten() for block in exact], excluded)


def _judge(found, wanted, excluded):
    for block, mine, theirs in zip(UNIT.blocks, found, wanted, strict=True):
        if block.name in excluded:
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
        else:
            torch.testing.assert_close(mine, theirs, rtol=0.1, atol=0.1)
            assert not torch.equal(mine, theirs) or not theirs.any()


def test_the_first_messages_of_each_unit_are_a_warm_up():
    def on_rank(group):
        ledger, vector = Ledger(), scattered(whole(dist.get_rank(group)), 2)
        collective = make_collective(group, ledger, "gradients", route(warmup=2))
        outputs = []
        for name in ("one", "one", "other", "one", "other", "other"):
            out = torch.empty(vector.numel() // 2)
            collective.reduce_scatter(out, vector, 1.0, Unit(name, UNIT.blocks))
            outputs.append(out)
        again = make_collective(group, Ledger(), "gradients", route(warmup=2))
        again.load_state_dict(collective.state_dict())
        assert again.state_dict() == collective.state_dict()
        assert ledger.accounts["gradients"].uncompressed == {"warm-up": 4}
        return {"outputs": torch.stack(outputs)}

    for rank, result in enumerate(run_ranks(2, on_rank)):
        exact = scattered([sum(p) for p in zip(whole(0), whole(1), strict=True)], 2).chunk(2)[rank]
        assert [torch.equal(out, exact) for out in result["outputs"]] == [
            True, True, True, False, True, False,
        ]  # fmt: skip


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-columns", "ddp", "fsdp1"])
def test_excluded_parameters_of_a_model_arrive_exactly(name):
    patterns = ["0.weight", "0.bias"] if name == "fsdp1" else ["*.bias", "2.*"]

    def on_rank(group):
        exact = WRAPPERS[name](group)
        gradients_after(exact, group, 2)
        model = WRAPPERS[name](group)
        handle = shardlab.attach(model, "int8:group=64", minimum_size=0, exclude=patterns)
        gradients_after(model, group, 2)
        assert handle.ledger.summary()["gradients"]["uncompressed"]["excluded by name"] > 0
        wanted, found = full(exact, "grad"), full(model, "grad")
        excluded = matching(patterns, [[key] for key in wanted])
        return {
            key: torch.stack(
                [wanted[key], found[key], torch.full_like(wanted[key], key in excluded)]
            )
            for key in wanted
        }

    for result in run_ranks(2, on_rank):
        for key, (wanted, found, excluded) in result.items():
            if excluded.any():
                torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
            else:
                assert not torch.equal(found, wanted), key
                torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.05)


def test_error_feedback_serves_what_is_left():
    def on_rank(group):
        model = WRAPPERS["fsdp2"](group)
        handle = shardlab.attach(
            model, "topk:density=0.1", error_feedback=True, minimum_size=0, exclude="*.bias"
        )
        for step in range(3):
            backward(model, group, step)
        return {
            name.removeprefix("gradients.residual.").replace(">", "_"): tensor
            for name, tensor in handle.state_dict().items()
        }

    result = run_ranks(2, on_rank)[0]
    # rows of the weights alone, padded to whole rows per rank
    assert result["0_1"].numel() == 30 * 40 and result["2_0"].numel() == 16 * 60
    assert Layout.of(result["layout:2"]) == Layout(2, True, ((31, 60),))


def test_a_pattern_matches_any_name_of_a_tied_parameter():
    names = [["embedding.weight", "head.weight"], ["block.0.bias"], ["block.1.bias"]]
    assert matching(["head.*"], names) == {"embedding.weight"}
    assert matching(["*.bias", "*.0.*"], names) == {"block.0.bias", "block.1.bias"}
    assert matching([], names) == frozenset()
    with pytest.raises(UserError, match=r"matches 'haed\.weight'; did you mean 'head\.weight'"):
        matching(["haed.weight"], names)


def test_a_message_that_lacks_a_parameter_of_its_unit_arrives_exactly():
    def lacking(rank):
        chunks = scattered(whole(rank), 2).view(2, -1)
        return chunks[:, : sum(UNIT.chunk_sizes(2)[:3])].flatten()

    def on_rank(group):
        ledger, vector = Ledger(), lacking(dist.get_rank(group))
        collective = make_collective(group, ledger, "gradients", route())
        out = torch.empty(vector.numel() // 2)
        collective.reduce_scatter(out, vector, 1.0, UNIT)
        assert ledger.accounts["gradients"].uncompressed == {"a parameter without gradient": 1}
        return {"out": out}

    exact = (lacking(0) + lacking(1)).chunk(2)
    for rank, result in enumerate(run_ranks(2, on_rank)):
        assert torch.equal(result["out"], exact[rank])


@on_ranks(2)
def test_a_unit_that_names_no_parameters_goes_through_the_codec(group) -> None:
    ledger, unit = Ledger(), Unit("unit")
    collective = make_collective(group, ledger, "gradients", route(["a"]))
    vector = scattered(whole(dist.get_rank(group)), 2)
    collective.reduce_scatter(torch.empty(vector.numel() // 2), vector, 1.0, unit)
    account = ledger.accounts["gradients"]
    assert account.elements > 0 and account.uncompressed == {}
