"""Excluded messages arrive exactly, the others through the codec, and the ledger lists both."""

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.codecs.base import Block, Unit
from shardlab.codecs.registry import make_codec, make_method
from shardlab.comm.codec_collective import Route
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from shardlab.models.names import matching
from tests.comm.phase_vectors import gradients, scattered, whole
from tests.comm.wire import is_same_everywhere, vector_of
from tests.comm.wrapped_models import WRAPPERS, full, gradients_after
from tests.ranks import on_ranks, run_ranks

UNIT = Unit("unit", (Block("a", 5, 3), Block("b", 4, 1), Block("c", 3, 7), Block("d", 6, 2)))


def summed(world_size):
    """The exact sum, block by block."""
    every = (gradients(rank, 0, UNIT) for rank in range(world_size))
    return [sum(blocks) for blocks in zip(*every, strict=True)]


def make(group, excluded=(), warmup=0):
    route = Route(make_codec("int8:group=8"), excluded=frozenset(excluded), warmup=warmup)
    return make_collective(group, Ledger(), "gradients", route)


def shard_of(collective, vector, unit=UNIT):
    out = torch.empty(vector.numel() // collective.world_size)
    collective.reduce_scatter(out, vector, 1.0, unit)
    return out


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("excluded", [["a"], ["b", "d"], ["a", "b", "c"], ["a", "b", "c", "d"]])
@on_ranks()
def test_excluded_blocks_arrive_exactly_and_the_others_through_the_codec(
    group, excluded, world_size
):
    collective, exact = make(group, excluded), summed(world_size)
    own = gradients(collective.rank, 0, UNIT)
    shard = shard_of(collective, scattered(own, world_size))
    sizes = UNIT.chunk_sizes(world_size)
    expected = scattered(exact, world_size).chunk(world_size)[collective.rank]
    check(shard.split(sizes), expected.split(sizes), excluded)
    total = whole(own, world_size)
    collective.all_reduce(total, 1.0, UNIT)
    assert is_same_everywhere(total, group)
    sizes = [block.numel() for block in exact]
    check(total.split(sizes), whole(exact, world_size).split(sizes), excluded)
    assert collective.account.uncompressed == {"excluded by name": 2}
    collective.ledger.reset()
    shard_of(collective, scattered(own, world_size))
    assert collective.account.extra_collectives == (len(excluded) < len(UNIT.blocks))


def check(found, wanted, excluded):
    for block, mine, theirs in zip(UNIT.blocks, found, wanted, strict=True):
        tolerance = 1e-6 if block.name in excluded else 0.1
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        assert block.name in excluded or not torch.equal(mine, theirs) or not theirs.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_a_message_that_padding_lengthens_to_the_minimum_is_short(group, dtype):
    route = Route(make_codec("int8:group=8"), minimum_size=16)
    collective = make_collective(group, Ledger(), "gradients", route)
    vector = torch.arange(15, dtype=dtype) / 7
    expected = vector.float().add(vector.float()).to(dtype)
    collective.all_reduce(vector, 1.0, Unit("short"))
    assert torch.equal(vector, expected)
    assert collective.account.uncompressed == {"fewer than 16 elements": 1}


@pytest.mark.parametrize("spec", ["int8:group=8", "powersgd:rank=1"])
@on_ranks(2)
def test_messages_with_fewer_elements_than_the_minimum_are_not_compressed(group, spec):
    route = Route(make_method(spec), minimum_size=100)
    collective = make_collective(group, Ledger(), "gradients", route)
    for elements, counted in ((98, 2), (100, 2), (102, 2)):
        vector = vector_of(collective.rank, elements)
        shard_of(collective, vector, Unit(f"scattered {elements}"))
        collective.all_reduce(vector, 1.0, Unit(f"summed {elements}"))
        assert collective.account.uncompressed["fewer than 100 elements"] == counted


@on_ranks(2)
def test_first_messages_of_each_unit_are_a_warm_up(group):
    collective, again = make(group, warmup=2), make(group, warmup=2)
    vector = scattered(gradients(collective.rank, 0, UNIT), 2)
    exact = scattered(summed(2), 2).chunk(2)[collective.rank]
    outputs = [
        shard_of(collective, vector, Unit(name, UNIT.blocks))
        for name in ("one", "one", "other", "one", "other", "other")
    ]
    assert [torch.equal(out, exact) for out in outputs] == [True, True, True, False, True, False]
    assert collective.account.uncompressed == {"warm-up": 4}
    again.load_state_dict(collective.state_dict())
    assert again.state_dict() == collective.state_dict()


@pytest.mark.parametrize("name", ["fsdp2", "fsdp2-columns", "ddp", "fsdp1"])
@on_ranks(2)
def test_excluded_parameters_of_a_model_arrive_exactly(group, name):
    patterns = ["0.weight", "0.bias"] if name == "fsdp1" else ["*.bias", "2.*"]
    exact, model = WRAPPERS[name](group), WRAPPERS[name](group)
    gradients_after(exact, group, 2)
    coded = {"codec": "int8:group=64", "minimum_size": 0}
    handle = shardlab.attach(model, {**coded, "exclude": patterns})
    gradients_after(model, group, 2)
    assert handle.ledger.summary()["gradients"]["uncompressed"]["excluded by name"] > 0
    wanted, found = full(exact, "grad"), full(model, "grad")
    excluded = matching(patterns, [[key] for key in wanted])
    for key, expected in wanted.items():
        if key in excluded:
            torch.testing.assert_close(found[key], expected, rtol=1e-5, atol=1e-7)
        else:
            assert not torch.equal(found[key], expected), key
            torch.testing.assert_close(found[key], expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", ["int8:group=64", "bf16", "powersgd:rank=2", "topk:density=0.3"])
def test_a_codec_takes_narrow_vectors_as_their_values(spec, dtype):
    """The result is that of the same values in float32, rounded once; so are residuals."""

    def worker(group):
        found = {}
        for narrow in (True, False):
            ledger, feedback = Ledger(), ErrorFeedback()
            route = Route(make_method(spec), minimum_size=100, feedback=feedback)
            ours = make_collective(group, ledger, "gradients", route)
            results = []
            for step in range(2):
                given = vector_of(dist.get_rank(group), 400, step).to(dtype)
                vector = given if narrow else given.float()
                shard = torch.empty(200, dtype=vector.dtype)
                ours.reduce_scatter(shard, vector, 0.5, Unit("scattered"))
                ours.all_reduce(vector, 0.5, Unit("summed"))
                results += [shard.to(dtype), vector.to(dtype)]
            counts = ledger.sums()["gradients"]
            found[narrow] = torch.cat(results), feedback.state_dict(), counts
        (ours, residuals, counts), (theirs, expected, wide) = found[True], found[False]
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
        assert residuals.keys() == expected.keys()
        assert all(torch.equal(residuals[name], expected[name]) for name in expected)
        assert counts["bytes_wire"] == wide["bytes_wire"]
        assert counts["bytes_raw"] == wide["bytes_raw"] / 2
        assert counts["uncompressed"] == wide["uncompressed"]

    run_ranks(2, worker)
