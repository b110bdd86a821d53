"""All modes of the slide engine train alike, to the bit, and in float32 as `ddp` does."""

import os
from itertools import product

import pytest
import torch

from shardlab.engines.slide.optimizer import update_workers
from tests.engines.slide.small_engine import (
    MODES,
    DelayedCopies,
    differing,
    engine_of,
    states_of,
    train,
)
from tests.ranks import on_ranks, run_ranks

STEPS = 50
CHECKPOINTING = ("none", "full")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("world_size", [1, 2])
def test_fifty_steps_have_the_bits_of_ddp(world_size, clip):
    def on_rank(group):
        expected = engine_of(group, {"engine": "ddp"}, clip)
        curve, states = train(expected, STEPS), states_of(expected)
        for mode, again in product(MODES.values(), CHECKPOINTING):
            document = {**mode, "activation_checkpointing": again}
            engine = engine_of(group, document, clip, accumulation=1)
            assert torch.equal(train(engine, STEPS), curve), document
            assert not differing(states_of(engine), states), document
        assert clip is None or (curve[:, 1] > clip).any()
        return {}

    run_ranks(world_size, on_rank, timeout_s=120)


@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(2)
def test_sums_in_memory_have_the_bits_of_ddp_with_any_number_of_micro_batches(group, micro) -> None:
    expected = engine_of(group, {"engine": "ddp"})
    curve, states = train(expected, 5, micro), states_of(expected)
    for transfer, window in product(("full", "shard"), (2, 3, 9)):
        document = {"engine": "slide", "param_transfer": transfer, "window": window}
        engine = engine_of(group, document)
        assert torch.equal(train(engine, 5, micro), curve), document
        assert not differing(states_of(engine), states), document


@pytest.mark.parametrize("clip", [None, 0.5])
def test_modes_agree_on_four_ranks_with_narrow_types_and_delays(clip):
    def on_rank(group):
        rank = torch.distributed.get_rank()
        wide = train(engine_of(group, {"engine": "slide", "param_dtype": "fp32"}, clip), 12)
        found = []
        for number, mode in enumerate(MODES.values()):
            copies = DelayedCopies(seed=4 * number + rank)
            document = {**mode, "param_dtype": "bf16"}
            engine = engine_of(group, document, clip, copies, accumulation=1)
            found.append((train(engine, 12), states_of(engine)))
        for curve, states in found[1:]:
            assert torch.equal(curve, found[0][0])
            assert not differing(states, found[0][1])
        # three significant digits
        torch.testing.assert_close(found[0][0][:, 0], wide[:, 0], rtol=0.02, atol=0)
        return {}

    run_ranks(4, on_rank, timeout_s=120)


@on_ranks(2)
def test_evaluation_between_steps_changes_nothing(group) -> None:
    straight, other = (engine_of(group, MODES["full-cpu_reduce"]) for _ in range(2))
    curve = train(straight, 4)
    train(other, 2)
    with torch.no_grad():
        tokens = torch.arange(8).view(1, 8)
        first = other.module(input_ids=tokens).logits
        assert torch.equal(other.module(input_ids=tokens).logits, first)
    assert torch.equal(train(other, 2, first=2), curve[2:])


@pytest.mark.parametrize("ranks_per_node, world_size", [(1, 2), (2, 4)])
@on_ranks()
def test_several_nodes_average_their_gradients(group, ranks_per_node, world_size) -> None:
    int8 = {**MODES["shard-gpu_reduce"], "gradients": {"codec": "int8"}}
    expected = train(engine_of(group, {"engine": "ddp"}), 6)
    for document in (*MODES.values(), int8):
        engine = engine_of(group, document, ranks_per_node=ranks_per_node)
        curve, states = train(engine, 6), states_of(engine)
        tolerance = 1e-2 if document is int8 else 0 if world_size == 2 else 1e-5
        torch.testing.assert_close(curve, expected, rtol=tolerance, atol=0)
        wire = engine.ledger.summary()["gradients"]["bytes_wire"]
        assert engine.groups.nodes == 2 and wire > 0
        same = [torch.zeros(()) for _ in range(world_size)]
        own = sum(state.double().sum() for state in states.values())
        torch.distributed.all_gather(same, own.float())
        assert len({float(each) for each in same}) == 1


@on_ranks(1)
def test_as_many_threads_update_as_compute_on_a_cpu(group) -> None:
    assert update_workers(group, torch.device("cpu")) is None
    expected = train(engine_of(group, {"engine": "slide"}), 3)
    torch.set_num_threads(3)
    try:
        workers = update_workers(group, torch.device("cpu"))
        engine = engine_of(group, {"engine": "slide"})
    finally:
        torch.set_num_threads(1)
    assert workers.threads == 3
    assert set(workers.cpus) == os.sched_getaffinity(0)
    assert torch.equal(train(engine, 3), expected)
