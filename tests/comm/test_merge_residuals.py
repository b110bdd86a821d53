"""States of one number of ranks continue on another: nothing that was held back is dropped."""

import pytest
import torch

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.handle import merge_states
from shardlab.comm.residuals import Layout, merge_residuals
from shardlab.core.errors import UserError

UNIT = Unit("block.0", (Block("w", 7, 5), Block("b", 3, 1), Block("e", 1, 11), Block("v", 8, 2)))
WHOLE = 41
TOLERANCE = {"fp32": 1e-6, "bf16": 0.02, "int8": 0.05}


def matrices(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b.rows, b.columns, generator=generator) for b in UNIT.blocks]


def states(world_size: int, kind: str) -> list[dict[str, torch.Tensor]]:
    """Residuals of known matrices on every rank: scattered, of rounds, and of a bucket."""
    scattered = Layout.scattering(UNIT, world_size, sum(UNIT.chunk_sizes(world_size)))
    whole = Layout.whole(world_size, WHOLE)
    result = []
    for rank in range(world_size):
        feedback = ErrorFeedback(kind)
        feedback.lay_out("block.0", scattered)
        feedback.lay_out("bucket0", whole)
        chunks = scattered.chunks_of(matrices(rank))
        bucket = torch.arange(WHOLE) * (rank + 1) / 50
        pieces = whole.chunks_of([bucket[:, None]])
        for to, (chunk, piece) in enumerate(zip(chunks, pieces, strict=True)):
            feedback.keep(f"block.0>{to}", chunk)
            feedback.keep(f"bucket0>{to}", piece)
        feedback.keep("block.0*", torch.cat(chunks))
        feedback.keep("bucket0*", bucket)
        feedback.keep("bucket0<", whole.chunks_of([torch.arange(WHOLE)[:, None] / 50])[rank])
        result.append(feedback.state_dict())
    return result


def owed(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What the residuals of all ranks owe to the mean, by parameter."""
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
        rounds = state["block.0*"].chunk(world_size)
        for name, each in (("sent", chunks), ("rounds", rounds)):
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
def test_the_mean_is_owed_the_same(old, new, kind):
    before = states(old, kind)
    after = [merge_residuals(before, new, rank) for rank in range(new)]
    expected, found = owed(before), owed(after)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=TOLERANCE[kind])
    exact = sum(torch.cat([m.flatten() for m in matrices(rank)]) for rank in range(old)) / old
    torch.testing.assert_close(found["sent"], exact, rtol=0, atol=TOLERANCE[kind])


def test_merged_residuals_are_those_of_a_model_on_the_new_ranks():
    before = states(4, "fp32")
    feedback = ErrorFeedback("fp32")
    feedback.load_state_dict(merge_residuals(before, 3, 0))
    feedback.lay_out("block.0", Layout.scattering(UNIT, 3, sum(UNIT.chunk_sizes(3))))
    feedback.given(torch.zeros(sum(UNIT.chunk_sizes(3))), "block.0>2")


def test_residuals_of_another_layout_are_refused():
    feedback = ErrorFeedback("fp32")
    feedback.load_state_dict(states(4, "fp32")[0])
    with pytest.raises(UserError, match=r"on 4 ranks, .* on 3 ranks: .*merge_states"):
        feedback.lay_out("block.0", Layout.scattering(UNIT, 3, sum(UNIT.chunk_sizes(3))))


def test_every_old_rank_has_to_give_its_state():
    prefixed = [
        {f"gradients.residual.{name}": tensor for name, tensor in state.items()}
        for state in states(4, "fp32")
    ]
    with pytest.raises(UserError, match="shared by 4 ranks, but there are 3 states"):
        merge_states(prefixed[:3], 2, 0)
    with pytest.raises(UserError, match="give the states of all old ranks"):
        merge_states([], 2, 0)


def test_a_residual_without_a_layout_is_not_dropped_in_silence():
    before = [{**state, "other>0": torch.ones(3)} for state in states(2, "fp32")]
    with pytest.raises(UserError, match="layout of the residual 'other>0'"):
        merge_residuals(before, 3, 0)


def test_counters_are_kept_and_what_a_method_learned_is_not():
    before = [
        {"gradients.group0.messages:a": torch.tensor(3), "gradients.group0.method/a": torch.ones(1)}
    ] * 2
    assert merge_states(before, 1, 0) == {"gradients.group0.messages:a": torch.tensor(3)}
