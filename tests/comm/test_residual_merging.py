"""Residuals on another number of ranks or nodes: what was not sent is still owed."""

import functools
import re

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.codecs.base import Block, Unit
from shardlab.codecs.registry import make_codec
from shardlab.comm.codec_collective import Route
from shardlab.comm.feedback import ErrorFeedback, ResidualLayout
from shardlab.comm.handle import merge_states
from shardlab.comm.ledger import Ledger
from shardlab.comm.routes import make_collective
from shardlab.core.errors import UserError
from tests.comm.phase_vectors import gradients, whole
from tests.comm.wire import gathered
from tests.comm.wrapped_models import ddp, fsdp1, fsdp2
from tests.ranks import on_ranks, run_ranks

UNIT = Unit("block.0", (Block("w", 7, 5), Block("b", 3, 1), Block("e", 1, 11), Block("v", 8, 2)))
WHOLE = 41
STEPS = 3
SPARSE = "topk:density=0.3"


def merge(states, world_size, rank, ranks_per_node=None):
    """The residuals of a rank, from those of all old ranks."""
    named = [
        {f"rank{old}.gradients.residual.{name}": tensor for name, tensor in state.items()}
        for old, state in enumerate(states)
    ]
    merged = merge_states(named, world_size, rank, ranks_per_node)
    return {name.partition(".residual.")[2]: tensor for name, tensor in merged.items()}


def whole_vectors(world_size: int, scattered: bool) -> list[dict[str, torch.Tensor]]:
    """Residuals of multi-phase methods, which send whole vectors."""
    layout = ResidualLayout.scattering(UNIT, world_size, 0)
    if not scattered:
        layout = ResidualLayout.whole(world_size, WHOLE)
    states = []
    for rank in range(world_size):
        feedback = ErrorFeedback()
        feedback.lay_out("block.0", layout)
        vector = torch.arange(WHOLE) * (rank + 1.0)
        if scattered:
            vector = torch.cat(layout.chunks_of(gradients(rank, 0, UNIT)))
        feedback.store_residual("block.0*", vector, torch.tensor(True))
        states.append(feedback.state_dict())
    return states


@pytest.mark.parametrize("new", [1, 2, 4, 5])
def test_merged_residuals_of_whole_vectors_owe_the_same_mean(new):
    bucket = merge(whole_vectors(3, False), new, 0)["block.0*"]
    torch.testing.assert_close(bucket, torch.arange(WHOLE) * 2.0)
    merged = merge(whole_vectors(3, True), new, 0)
    blocks = ResidualLayout.of(merged["layout:block.0"]).blocks_of(merged["block.0*"].chunk(new))
    exact = sum(whole(gradients(rank, 0, UNIT), 1) for rank in range(3)) / 3
    torch.testing.assert_close(torch.cat([block.flatten() for block in blocks]), exact)


def test_states_that_cannot_be_merged_are_refused():
    states = whole_vectors(4, True)
    with pytest.raises(UserError, match="shared by 4 ranks, but there are 3 states"):
        merge(states[:3], 2, 0)
    with pytest.raises(UserError, match="give the states of all old ranks"):
        merge([], 2, 0)
    with pytest.raises(UserError, match=r"nothing of rank 0.*merge_states"):
        merge_states([{"rank1.gradients.residual.a*": torch.ones(1)}], 2, 0)
    feedback = ErrorFeedback()
    feedback.lay_out("root", ResidualLayout.whole(2, 8))
    feedback.lay_out("root@replicas", ResidualLayout.whole(2, 4))
    with pytest.raises(UserError, match="fit the same mesh alone: continue with it, or remove"):
        merge([feedback.state_dict()] * 4, 2, 0)
    feedback = ErrorFeedback()
    feedback.lay_out("root", ResidualLayout.whole(4, 8)._replace(ranks_per_node=2))
    with pytest.raises(UserError, match="3 ranks are not whole nodes of 2: give ranks_per_node"):
        merge([feedback.state_dict()] * 4, 3, 0)


def test_counters_are_kept_and_state_of_methods_is_dropped():
    counter, method = "gradients.group0.messages:a", "gradients.group0.method/a"
    before = [
        {f"rank{rank}.{counter}": torch.tensor(3), f"rank{rank}.{method}": torch.ones(1)}
        for rank in range(2)
    ]
    assert merge_states(before, 1, 0) == {f"rank0.{counter}": torch.tensor(3)}


def attached(group, inside, between, nodes_of, feedback):
    second = None if between is None else make_codec(between)
    route = Route(make_codec(inside), between_nodes=second, feedback=feedback)
    return make_collective(group, Ledger(nodes_of), "gradients", route)


def bucket_of(rank, step):
    generator = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(WHOLE, generator=generator)


def mean(collective, group, blocks, bucket):
    """The mean over ranks of a unit that is scattered and of a bucket, as one vector."""
    size = collective.world_size
    layout = ResidualLayout.scattering(UNIT, size, 0)
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
def before(world_size, nodes_of, inside, between, kind="fp32"):
    """The states of the ranks, and what they owe to the mean of all gradients so far."""

    def on_rank(group):
        feedback, rank = ErrorFeedback(kind), dist.get_rank(group)
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
    ("new", "old", "levels", "kind"),
    [
        ((1, None), (3, None), (SPARSE, None), "fp32"),
        ((1, 1), (4, 2), ("none", SPARSE), "fp32"),
        ((2, None), (3, None), (SPARSE, None), "bf16"),
        ((2, None), (4, None), (SPARSE, None), "int8"),
        ((3, 1), (4, 2), (SPARSE, SPARSE), "fp32"),
        ((3, None), (2, None), (SPARSE, None), "fp32"),
        ((4, 2), (6, 3), (SPARSE, "bf16"), "fp32"),
        ((6, 3), (4, 2), (SPARSE, SPARSE), "fp32"),
    ],
    ids=str,
)
def test_other_ranks_and_nodes_send_merged_residuals(old, new, levels, kind):
    states, owed = before(*old, *levels, kind)
    assert owed.norm() > 0.1
    tolerance = {"fp32": 1e-5, "bf16": 0.05, "int8": 0.1}[kind]

    def on_rank(group):
        feedback = ErrorFeedback(kind)
        feedback.load_state_dict(merge(states, new[0], dist.get_rank(group), new[1]))
        # with gradients of zeros, codecs that drop nothing send all that is owed
        everything = [level and level.replace(SPARSE, "topk:density=1.0") for level in levels]
        everything = ["topk:density=1.0" if level == "bf16" else level for level in everything]
        sent = mean(attached(group, *everything, new[1], feedback), group, *zeros())
        torch.testing.assert_close(sent, owed, rtol=1e-4, atol=tolerance)
        assert feedback.norm() == 0

    run_ranks(new[0], on_rank)


@pytest.mark.parametrize("wrap", [fsdp2, fsdp1, ddp])
@on_ranks(1)
def test_residuals_that_one_rank_would_never_add_are_refused(group, wrap):
    state = {f"rank0.gradients.residual.{name}": torch.ones(8) for name in ("root>0", "root<")}
    state["rank0.gradients.residuals"] = torch.tensor(2)
    handle = shardlab.attach(wrap(group), {"codec": "int8", "error_feedback": True})
    if wrap is ddp:
        handle.load_state_dict(state)
        return
    with pytest.raises(UserError, match="on one rank fully_shard sends no gradients") as caught:
        handle.load_state_dict(state)
    key = re.search("keys with '([^']+)'", str(caught.value))[1]
    handle.load_state_dict({k: v for k, v in state.items() if key not in k})
