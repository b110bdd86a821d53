"""Frozen parameters: streamed with the others, never off-loaded or updated."""

import pytest
import torch

from shardlab.core.errors import UserError
from tests.engines.small_engine import (
    MODES,
    DelayedCopies,
    differing,
    engine_of,
    train,
)
from tests.ranks import on_ranks

SPLITS = {
    "first-blocks": ("wte", "wpe", "h.0.", "h.1."),
    "inner-blocks": ("h.1.", "h.2."),
    "matrices": ("weight",),
    "what-comes-first": ("wpe", "ln_1", "attn"),
    "all-but-one-block": ("wte", "wpe", "ln_f", "h.0.", "h.1.", "h.3."),
}
"""by parts of names"""


def weights_of(engine):
    """All parameters by name."""
    return {
        name: part.clone() for whole in engine.whole_parameters() for name, part in whole.items()
    }


def slid(group, document, clip=0.5, copies=None, **more):
    """An engine in which a use of what has left the device gives NaN."""
    engine = engine_of(group, document, clip, copies, **more)
    engine._schedule.window.poison = True
    return engine


# every pair of what is frozen, a mode, and a number of ranks or a way of clipping
@pytest.mark.parametrize(
    ("world_size", "clip", "split"),
    [
        (world_size, (None, 0.5)[(world_size + number) % 2], split)
        for number, split in enumerate(SPLITS)
        for world_size in (1, 2)
    ],
)
@on_ranks()
def test_partly_frozen_training_has_the_bits_of_ddp(group, world_size, clip, split) -> None:
    frozen = SPLITS[split]
    expected = engine_of(group, {"engine": "ddp"}, clip, frozen=frozen)
    first = weights_of(expected)
    curve, weights = train(expected, 2), weights_of(expected)
    kept = {name for name in weights if any(part in name for part in frozen)}
    assert {*differing(weights, first)} == weights.keys() - kept and kept
    turn = world_size + [*SPLITS].index(split) // 2
    for number, mode in list(enumerate(MODES.values()))[turn % 2 :: 2]:
        again = ("none", "full")[(number + turn) // 2 % 2]
        document = {**mode, "activation_checkpointing": again}
        engine = slid(group, document, clip, accumulation=1, frozen=frozen)
        assert torch.equal(train(engine, 2), curve), document
        assert not differing(weights_of(engine), weights), document


@pytest.mark.parametrize(
    "sync, clip", [("cpu_reduce", 0.5), pytest.param("gpu_reduce", None, marks=pytest.mark.long)]
)
@on_ranks(3)
def test_sharded_transfers_have_the_bits_of_whole_ones_in_narrow_types_with_delays(
    group, sync, clip
) -> None:
    frozen = SPLITS["what-comes-first"]
    rank, found = torch.distributed.get_rank(), []
    for number, transfer in enumerate(("full", "shard")):
        document = {**MODES[f"{transfer}-{sync}"], "param_dtype": "bf16", "moments": "disk"}
        copies = DelayedCopies(seed=3 * number + rank)
        engine = slid(group, document, clip, copies, accumulation=2, frozen=frozen)
        first = weights_of(engine)
        curve, weights = train(engine, 2, micro=2), weights_of(engine)
        kept = {name for name in weights if any(part in name for part in frozen)}
        assert {*differing(weights, first)} == weights.keys() - kept
        assert {weights[name].dtype for name in kept} == {torch.bfloat16}
        found.append((curve, weights))
    wide = slid(group, {"engine": "slide", "param_dtype": "fp32"}, clip, frozen=frozen)
    torch.testing.assert_close(found[0][0], train(wide, 2, micro=2), rtol=0.02, atol=0)
    assert torch.equal(found[0][0], found[1][0])
    assert not differing(found[0][1], found[1][1])


@pytest.mark.parametrize(
    "split", ["inner-blocks", pytest.param("what-comes-first", marks=pytest.mark.long)]
)
@on_ranks(2)
def test_nodes_average_gradients_of_trained_parameters(group, split) -> None:
    frozen = SPLITS[split]
    expected = engine_of(group, {"engine": "ddp"}, frozen=frozen)
    curve, weights = train(expected, 2), weights_of(expected)
    for mode in MODES.values():
        engine = slid(group, mode, ranks_per_node=1, frozen=frozen)
        assert torch.equal(train(engine, 2), curve)
        assert not differing(weights_of(engine), weights)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_frozen_unit_has_no_traffic_and_no_moments(group, mode) -> None:
    engine = slid(group, MODES[mode], frozen=SPLITS["all-but-one-block"])
    train(engine, 2)
    sizes = {name: len(place) for name, place in engine._memory._places.items() if name}
    laid_out = {name.split("/")[0] for name, size in sizes.items() if size and "exp" in name}
    [trained] = [unit for unit in engine.units if unit.count]
    assert laid_out == {trained.name}
    assert engine.shards()["exp_avg"].keys() == {trained.name}
    moved = engine.ledger.summary()["gradients"]["bytes_raw"]
    assert moved == 2 * trained.size * 4 / 2  # of each of two steps the other rank's half


@on_ranks(1)
def test_backward_fetches_only_units_that_it_passes(group) -> None:
    class CountedCopies(DelayedCopies):
        def copy(self, target, source):
            copied.append(source.data_ptr())
            super().copy(target, source)

    copied = []
    frozen = ("wte", "wpe", "ln_f", "h.0.", "h.1.", "h.2.")
    engine = slid(group, {"engine": "slide"}, 0.5, CountedCopies(0), frozen=frozen)
    train(engine, 2)
    engine.synchronize()
    counts = [copied.count(unit.source.data_ptr()) for unit in engine.units]
    # root, then blocks: forward brings each, and what follows begins with the first two
    assert counts == [1, 3, 3, 2, 2]


@pytest.mark.parametrize("split", ["inner-blocks", "matrices"])
@on_ranks(1)
def test_units_with_frozen_parameters_are_prefetched_in_backward(group, split) -> None:
    """All that is brought at the last moment is waited for."""
    engine = slid(group, {"engine": "slide"}, 0.5, frozen=SPLITS[split])
    schedule, late = engine._schedule, []
    begun, brought = schedule.before_backward, schedule.window.admit
    needed = []

    def before_backward(index):
        needed.append(schedule.units[index])
        begun(index)
        needed.clear()

    def admit(unit):
        late.extend(each for each in needed if each is unit)
        return brought(unit)

    schedule.before_backward, schedule.window.admit = before_backward, admit
    train(engine, 2)
    assert not late


@on_ranks(1)
def test_changed_requires_grad_is_refused_until_it_is_set_back(group) -> None:
    engine = slid(group, MODES["full-cpu_reduce"], frozen=("wte",))
    train(engine, 1)
    parameters = dict(engine.module._model[0].named_parameters())
    for name in ("transformer.wte.weight", "transformer.h.1.ln_1.bias"):
        before = parameters[name].requires_grad
        parameters[name].requires_grad_(not before)
        with pytest.raises(UserError, match=f"^slide: requires_grad of {name} .* {not before}: "):
            train(engine, 1)
        parameters[name].requires_grad_(before)
        train(engine, 1)
