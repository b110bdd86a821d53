"""Residuals of two levels on other ranks and nodes: what was held back is sent there."""

import functools

import pytest
import torch
import torch.distributed as dist

from shardlab.codecs.registry import make_codec
from shardlab.codecs.unit import Block, Unit
from shardlab.comm.build import Route, make_collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Ledger
from shardlab.comm.residuals import Layout, merge_residuals
from shardlab.core.errors import UserError
from tests.ranks import run_ranks

UNIT = Unit("block.0", (Block("w", 7, 5), Block("b", 3, 1), Block("v", 8, 2)))
SIZES = [block.rows * block.columns for block in UNIT.blocks]
WHOLE, STEPS = 41, 3


def gradients(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a unit that is scattered, block by block, and of a bucket."""
    generator = torch.Generator().manual_seed(10 * rank + step)
    return tuple(torch.randn(n, generator=generator) for n in (sum(SIZES), WHOLE))


def attached(group, inside, between, nodes_of, feedback):
    route = Route(
        make_codec(inside), between_nodes=make_codec(between), ranks_per_node=nodes_of, seed=1
    )
    return make_collective(group, Ledger(), "gradients", route, feedback)


def mean(collective, group, flat, bucket):
    """What the ranks apply of one gradient of each kind."""
    size = collective.world_size
    layout = Layout.scattering(UNIT, size, 0)
    blocks = [
        x.view(b.rows, b.columns) for x, b in zip(flat.split(SIZES), UNIT.blocks, strict=True)
    ]
    vector = torch.cat(layout.chunks_of(blocks))
    shard = vector.new_empty(vector.numel() // size)
    collective.reduce_scatter(shard, vector, 1 / size, UNIT)
    shards = [torch.empty_like(shard) for _ in range(size)]
    dist.all_gather(shards, shard, group=group)
    whole = bucket.clone()
    collective.all_reduce(whole, 1 / size, Unit("bucket0"))
    return torch.cat([*(block.flatten() for block in layout.blocks_of(shards)), whole])


@functools.cache
def before(world_size: int, nodes_of: int, inside: str, between: str):
    """The states of the ranks, and what they owe to the mean of all gradients so far."""

    def on_rank(group):
        feedback = ErrorFeedback()
        collective = attached(group, inside, between, nodes_of, feedback)
        sent = 0
        for step in range(STEPS):
            sent += mean(collective, group, *gradients(dist.get_rank(group), step))
        state = {key.replace(">", " to "): value for key, value in feedback.state_dict().items()}
        return state | {"sent": sent}

    results = run_ranks(world_size, on_rank)
    given = sum(
        torch.cat(gradients(rank, step)) for rank in range(world_size) for step in range(STEPS)
    )
    sent = results[0].pop("sent")
    states = [
        {key.replace(" to ", ">"): value for key, value in result.items() if key != "sent"}
        for result in results
    ]
    return states, given / world_size - sent


@pytest.mark.parametrize("new", [(4, 2), (6, 3), (6, 2), (2, 2), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize(
    ("old", "levels"),
    [
        ((4, 2), ("topk:density=0.3", "topk:density=0.3")),
        ((4, 2), ("none", "topk:density=0.3")),
        ((6, 3), ("topk:density=0.3", "bf16")),
    ],
    ids=str,
)
def test_other_ranks_and_nodes_send_what_was_held_back(old, new, levels):
    states, owed = before(*old, *levels)
    assert owed.norm() > 0.1

    def on_rank(group):
        feedback = ErrorFeedback()
        rank = dist.get_rank(group)
        feedback.load_state_dict(merge_residuals(states, new[0], rank, new[1]))
        # with nothing new to send, codecs that drop nothing send all that is owed
        everything = ["none" if level == "none" else "topk:density=1.0" for level in levels]
        collective = attached(group, *everything, new[1], feedback)
        sent = mean(collective, group, torch.zeros(sum(SIZES)), torch.zeros(WHOLE))
        return {"sent": sent, "left": torch.tensor(feedback.norm())}

    for result in run_ranks(new[0], on_rank):
        torch.testing.assert_close(result["sent"], owed, rtol=1e-4, atol=1e-5)
        assert result["left"] == 0


def test_the_same_ranks_in_other_nodes_need_merged_states():
    states, _ = before(4, 2, "topk:density=0.3", "topk:density=0.3")

    def on_rank(group):
        feedback = ErrorFeedback()
        feedback.load_state_dict(states[dist.get_rank(group)])
        collective = attached(group, "int8", "int8", 4, feedback)
        with pytest.raises(UserError, match=r"nodes of 2, the model of .* nodes of 4: .*merge_sta"):
            mean(collective, group, torch.zeros(sum(SIZES)), torch.zeros(WHOLE))
        return {}

    run_ranks(4, on_rank)


def test_new_ranks_have_to_be_whole_nodes():
    states, _ = before(4, 2, "topk:density=0.3", "topk:density=0.3")
    with pytest.raises(UserError, match="3 ranks are not whole nodes of 2: give ranks_per_node"):
        merge_residuals(states, 3, 0)


def test_residuals_of_two_dimensional_meshes_say_what_to_do():
    feedback = ErrorFeedback()
    feedback.lay_out("root", Layout.whole(2, 8))
    feedback.lay_out("root@replicas", Layout.whole(2, 4))
    with pytest.raises(UserError, match="fit the same mesh alone: continue with it, or remove"):
        merge_residuals([feedback.state_dict()] * 4, 2, 0)
