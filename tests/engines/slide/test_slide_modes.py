"""All modes of the slide engine train alike, to the bit, and in float32 as `ddp` does."""

import os
from itertools import product

import pytest
import torch

from shardlab.engines.slide_optimizer import update_workers
from tests.engines.small_engine import (
    MODES,
    DelayedCopies,
    differing,
    engine_of,
    states_of,
    train,
)
from tests.ranks import on_ranks

CHECKPOINTING = ("none", "full")


@pytest.mark.parametrize(
    "world_size, clip, steps",
    [
        *((world_size, clip, 3) for world_size in (1, 2) for clip in (None, 0.5)),
        pytest.param(2, 0.5, 12, marks=pytest.mark.long),
    ],
)
@on_ranks()
def test_all_modes_have_the_bits_of_ddp(group, world_size, clip, steps) -> None:
    expected = engine_of(group, {"engine": "ddp"}, clip)
    curve, states = train(expected, steps), states_of(expected)
    for number, (mode, again) in enumerate(product(MODES.values(), CHECKPOINTING)):
        if (number + number // 2 + world_size + (clip is None)) % 2:
            continue  # each mode with one of the two, in turn
        document = {**mode, "activation_checkpointing": again}
        engine = engine_of(group, document, clip, accumulation=1)
        assert torch.equal(train(engine, steps), curve), document
        assert not differing(states_of(engine), states), document
    assert clip is None or (curve[:, 1] > clip).any()


@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(2)
def test_sums_in_memory_have_the_bits_of_ddp_with_any_number_of_micro_batches(group, micro) -> None:
    expected = engine_of(group, {"engine": "ddp"})
    curve, states = train(expected, 2, micro), states_of(expected)
    for number, window in enumerate((2, 3, 9)):
        transfer = ("full", "shard")[(number + micro // 2) % 2]
        document = {"engine": "slide", "param_transfer": transfer, "window": window}
        engine = engine_of(group, document)
        assert torch.equal(train(engine, 2, micro), curve), document
        assert not differing(states_of(engine), states), document


# both transfers and both reductions, with either way of clipping
@pytest.mark.parametrize(
    ("clip", "modes"),
    [
        pytest.param(None, ("full-cpu_reduce", "shard-gpu_reduce"), marks=pytest.mark.long),
        (0.5, ("shard-cpu_reduce", "full-gpu_reduce")),
    ],
)
@on_ranks(4)
def test_modes_agree_on_four_ranks_with_narrow_types_and_delays(group, clip, modes) -> None:
    rank = torch.distributed.get_rank()
    wide = train(engine_of(group, {"engine": "slide", "param_dtype": "fp32"}, clip), 2)
    found = []
    for number, mode in enumerate(modes):
        copies = DelayedCopies(seed=4 * number + rank)
        document = {**MODES[mode], "param_dtype": "bf16"}
        engine = engine_of(group, document, clip, copies, accumulation=1)
        found.append((train(engine, 2), states_of(engine)))
    assert torch.equal(found[0][0], found[1][0])
    assert not differing(found[0][1], found[1][1])
    # three significant digits
    torch.testing.assert_close(found[0][0][:, 0], wide[:, 0], rtol=0.02, atol=0)


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


@pytest.mark.parametrize(
    "ranks_per_node, world_size", [(1, 2), pytest.param(2, 4, marks=pytest.mark.long)]
)
@on_ranks()
def test_several_nodes_average_their_gradients(group, ranks_per_node, world_size) -> None:
    int8 = {**MODES["shard-gpu_reduce"], "gradients": {"codec": "int8"}}
    expected = train(engine_of(group, {"engine": "ddp"}), 2)
    for document in (*MODES.values(), int8):
        engine = engine_of(group, document, ranks_per_node=ranks_per_node)
        curve, states = train(engine, 2), states_of(engine)
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
