"""Residuals on another number of ranks or nodes: what was not sent is still owed."""

import functools

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.base import Block, Unit
from shardlab.codecs.registry import make_codec
from shardlab.comm.attach import Route, make_collective
from shardlab.comm.feedback import ErrorFeedback, Layout
from shardlab.comm.handle import merge_residuals, merge_states
from shardlab.comm.ledger import Ledger
from shardlab.core.errors import UserError
from tests.comm.phase_vectors import gradients, whole
from tests.comm.wire import gathered
from tests.ranks import run_ranks

UNIT = Unit("block.0", (Block("w", 7, 5), Block("b", 3, 1), Block("e", 1, 11), Block("v", 8, 2)))
WHOLE = 41
SENT = torch.tensor(True)
TOLERANCE = {"fp32": 1e-6, "bf16": 0.02, "int8": 0.05}


def states(world_size: int, kind: str) -> list[dict[str, torch.Tensor]]:
    """Residuals of known matrices on every rank: scattered, in phases, and of a bucket."""
    scattered = Layout.scattering(UNIT, world_size, sum(UNIT.chunk_sizes(world_size)))
    whole = Layout.whole(world_size, WHOLE)
    result = []
    for rank in range(world_size):
        feedback = ErrorFeedback(kind)
        feedback.lay_out("block.0", scattered)
        feedback.lay_out("bucket0", whole)
        chunks = scattered.chunks_of(gradients(rank, 0, UNIT))
        bucket = torch.arange(WHOLE) * (rank + 1) / 50
        pieces = whole.chunks_of([bucket[:, None]])
        for to, (chunk, piece) in enumerate(zip(chunks, pieces, strict=True)):
            feedback.store_residual(f"block.0>{to}", chunk, SENT)
            feedback.store_residual(f"bucket0>{to}", piece, SENT)
        feedback.store_residual("block.0*", torch.cat(chunks), SENT)
        feedback.store_residual("bucket0*", bucket, SENT)
        owned = whole.chunks_of([torch.arange(WHOLE)[:, None] / 50])[rank]
        feedback.store_residual("bucket0<", owned, SENT)
        result.append(feedback.state_dict())
    return result


def owed(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Share of the mean that the residuals of all ranks hold, by parameter."""
    world_size = len(states)
    read = []
    for state in states:
        feedback = ErrorFeedback("fp32")
        feedback.load_state_dict(state)
        read.append(feedback.state_dict())
    scattered, whole = (Layout.of(read[0][f"layout:{unit}"]) for unit in ("block.0", "bucket0"))
    assert scattered.world_size == whole.world_size == world_size
    total: dict[str, torch.Tensor] = {}
    for state in read:
        chunks = [state[f"block.0>{to}"] for to in range(world_size)]
        phases = state["block.0*"].chunk(world_size)
        for name, each in (("sent", chunks), ("phases", phases)):
            flat = torch.cat([block.flatten() for block in scattered.blocks_of(each)])
            total[name] = total.get(name, 0) + flat / world_size
        pieces = [state[f"bucket0>{to}"] for to in range(world_size)]
        total["bucket"] = total.get("bucket", 0) + whole.blocks_of(pieces)[0] / world_size
        total["bucket*"] = total.get("bucket*", 0) + state["bucket0*"] / world_size
    total["owners"] = whole.blocks_of([state["bucket0<"] for state in read])[0]
    return total


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("old", [4, 1, 3])
def test_merged_residuals_owe_the_same_mean(old, new, kind):
    before = states(old, kind)
    after = [merge_residuals(before, new, rank) for rank in range(new)]
    expected, found = owed(before), owed(after)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=TOLERANCE[kind])
    exact = (
        sum(torch.cat([m.flatten() for m in gradients(rank, 0, UNIT)]) for rank in range(old)) / old
    )
    torch.testing.assert_close(found["sent"], exact, rtol=0, atol=TOLERANCE[kind])


def test_residuals_of_another_layout_are_refused():
    feedback = ErrorFeedback("fp32")
    feedback.load_state_dict(states(4, "fp32")[0])
    known = r"of 65 elements in 4 blocks on 4 ranks, .* on 3 ranks: .*merge_states"
    with pytest.raises(UserError, match=known):
        feedback.lay_out("block.0", Layout.scattering(UNIT, 3, sum(UNIT.chunk_sizes(3))))


def test_states_of_all_old_ranks_are_required():
    prefixed = [
        {f"rank{rank}.gradients.residual.{name}": tensor for name, tensor in state.items()}
        for rank, state in enumerate(states(4, "fp32"))
    ]
    with pytest.raises(UserError, match="shared by 4 ranks, but there are 3 states"):
        merge_states(prefixed[:3], 2, 0)
    with pytest.raises(UserError, match="give the states of all old ranks"):
        merge_states([], 2, 0)
    with pytest.raises(UserError, match=r"nothing of rank 0.*merge_states"):
        merge_states(prefixed[::-1], 2, 0)


def test_counters_are_kept_and_state_of_methods_is_dropped():
    counter, method = "gradients.group0.messages:a", "gradients.group0.method/a"
    before = [
        {f"rank{rank}.{counter}": torch.tensor(3), f"rank{rank}.{method}": torch.ones(1)}
        for rank in range(2)
    ]
    assert merge_states(before, 1, 0) == {f"rank0.{counter}": torch.tensor(3)}


SIZES = [block.rows * block.columns for block in UNIT.blocks]
STEPS = 3


def attached(group, inside, between, nodes_of, feedback):
    route = Route(
        make_codec(inside), between_nodes=make_codec(between), ranks_per_node=nodes_of, seed=1
    )
    return make_collective(group, Ledger(), "gradients", route, feedback)


def bucket_of(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(WHOLE, generator=generator)


def mean(collective, group, blocks, bucket):
    """The mean over ranks of a unit that is scattered and of a bucket, as one vector."""
    size = collective.world_size
    layout = Layout.scattering(UNIT, size, 0)
    vector = torch.cat(layout.chunks_of(blocks))
    shard = vector.new_empty(vector.numel() // size)
    collective.reduce_scatter(shard, vector, 1 / size, UNIT)
    whole = bucket.clone()
    collective.all_reduce(whole, 1 / size, Unit("bucket0"))
    blocks = layout.blocks_of(gathered(shard, group))
    return torch.cat([*(block.flatten() for block in blocks), whole])


def zeros():
    return [torch.zeros(b.rows, b.columns) for b in UNIT.blocks], torch.zeros(WHOLE)


@functools.cache
def before(world_size: int, nodes_of: int, inside: str, between: str):
    """The states of the ranks, and what they owe to the mean of all gradients so far."""

    def on_rank(group):
        feedback, rank = ErrorFeedback(), dist.get_rank(group)
        collective = attached(group, inside, between, nodes_of, feedback)
        sent = 0
        for step in range(STEPS):
            sent += mean(collective, group, gradients(rank, step, UNIT), bucket_of(rank, step))
        return feedback.state_dict() | {"sent": sent}

    states = run_ranks(world_size, on_rank)
    sent, *_ = [state.pop("sent") for state in states]
    given = sum(
        torch.cat([whole(gradients(rank, step, UNIT), 1), bucket_of(rank, step)])
        for rank in range(world_size)
        for step in range(STEPS)
    )
    return states, given / world_size - sent


# the new ranks in the order of their number: ranks of few sizes are kept
@pytest.mark.parametrize(
    ("new", "old", "levels"),
    [
        ((1, 1), (4, 2), ("topk:density=0.3", "topk:density=0.3")),
        ((1, 1), (4, 2), ("none", "topk:density=0.3")),
        ((2, 2), (4, 2), ("none", "topk:density=0.3")),
        ((2, 2), (6, 3), ("topk:density=0.3", "bf16")),
        ((3, 1), (6, 3), ("topk:density=0.3", "bf16")),
        ((3, 1), (4, 2), ("topk:density=0.3", "topk:density=0.3")),
        ((4, 2), (6, 3), ("topk:density=0.3", "bf16")),
        ((4, 2), (4, 2), ("none", "topk:density=0.3")),
        ((6, 3), (4, 2), ("topk:density=0.3", "topk:density=0.3")),
        ((6, 2), (4, 2), ("none", "topk:density=0.3")),
        ((6, 2), (6, 3), ("topk:density=0.3", "bf16")),
    ],
    ids=str,
)
def test_other_ranks_and_nodes_send_merged_residuals(old, new, levels):
    states, owed = before(*old, *levels)
    assert owed.norm() > 0.1

    def on_rank(group):
        feedback = ErrorFeedback()
        feedback.load_state_dict(merge_residuals(states, new[0], dist.get_rank(group), new[1]))
        # with gradients of zeros, codecs that drop nothing send all that is owed
        everything = ["none" if level == "none" else "topk:density=1.0" for level in levels]
        sent = mean(attached(group, *everything, new[1], feedback), group, *zeros())
        torch.testing.assert_close(sent, owed, rtol=1e-4, atol=1e-5)
        assert feedback.norm() == 0

    run_ranks(new[0], on_rank)


def test_new_ranks_must_be_whole_nodes():
    states, _ = before(4, 2, "topk:density=0.3", "topk:density=0.3")
    with pytest.raises(UserError, match="3 ranks are not whole nodes of 2: give ranks_per_node"):
        merge_residuals(states, 3, 0)


def test_residuals_of_two_dimensional_meshes_are_refused():
    feedback = ErrorFeedback()
    feedback.lay_out("root", Layout.whole(2, 8))
    feedback.lay_out("root@replicas", Layout.whole(2, 4))
    with pytest.raises(UserError, match="fit the same mesh alone: continue with it, or remove"):
        merge_residuals([feedback.state_dict()] * 4, 2, 0)
