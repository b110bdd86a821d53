"""Gradients in host memory: shared slots, and float32 sums of narrow types."""

from functools import partial

import pytest
import torch

from shardlab.core.errors import UserError
from shardlab.engines.slide_transfers import ThrottledCopies
from tests.engines.small_engine import (
    MODES,
    PoisoningCopies,
    batch_of,
    differing,
    engine_of,
    states_of,
    train,
)
from tests.ranks import on_ranks

LAYERS = 8
"""more than there are slots"""
CPU, GPU = MODES["full-cpu_reduce"], MODES["full-gpu_reduce"]
INT8 = {"gradients": {"codec": "int8"}}
KINDS = {
    "cpu": CPU,
    "cpu-int8": {**CPU, **INT8},
    "gpu": GPU,
    "shard-gpu": MODES["shard-gpu_reduce"],
}
EVERY = {"reduce_every_micro_batch": True}


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        *((kind, 2) for kind in KINDS),
        *((kind, 1) for kind in ("cpu", "shard-gpu")),
        *(pytest.param(kind, 4, marks=pytest.mark.long) for kind in ("cpu-int8", "shard-gpu")),
    ],
)
@on_ranks()
def test_shared_slots_give_the_bits_of_private_slots(group, kind, world_size) -> None:
    rank = torch.distributed.get_rank()
    build = partial(engine_of, group, KINDS[kind], None, layers=LAYERS)
    own, shared = build(), build(PoisoningCopies(rank), accumulation=1)
    assert torch.equal(train(shared, 2), train(own, 2))
    assert not differing(states_of(shared), states_of(own))


# without clipping, gradients of other units follow in the same step
@pytest.mark.parametrize(
    ("kind", "clip", "micro", "every"),
    [
        ("cpu", None, 2, True),
        ("cpu-int8", None, 2, False),
        ("shard-gpu", 0.5, 2, True),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                ("cpu", 0.5, 2, False),
                ("gpu", None, 3, True),
                ("shard-gpu", None, 2, False),
            )
        ),
    ],
)
@on_ranks(2)
def test_slots_are_shared_by_micro_batches_too(group, kind, clip, micro, every) -> None:
    document = {**KINDS[kind], "reduce_every_micro_batch": every}
    rank = torch.distributed.get_rank()
    build = partial(engine_of, group, document, clip, accumulation=micro, layers=LAYERS)
    plain, poisoned = build(ThrottledCopies()), build(PoisoningCopies(rank))
    assert torch.equal(train(poisoned, 2, micro), train(plain, 2, micro))
    assert not differing(states_of(poisoned), states_of(plain))


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("micro", [1, 2])
@on_ranks(2)
def test_ranks_that_use_different_parameters_do_not_deadlock(group, micro, kind) -> None:
    """Each rank leaves out a layer of its own, once altogether and once with a factor of zero."""
    rank, found = torch.distributed.get_rank(), []
    for factor in (None, 0.0):
        copies = PoisoningCopies(rank)
        build = partial(engine_of, group, KINDS[kind], None, copies, layers=LAYERS)
        engine = build(accumulation=micro)
        block = engine.module._model[0].transformer.h[LAYERS - 1 - 2 * rank]
        leave_out(block.mlp, factor)
        found.append((train(engine, 2, micro), states_of(engine)))
    assert torch.equal(found[0][0], found[1][0])
    assert not differing(found[0][1], found[1][1])


def leave_out(module, factor):
    forward = module.forward

    def left_out(hidden):
        return torch.zeros_like(hidden) if factor is None else factor * forward(hidden)

    module.forward = left_out


NARROW = {
    "cpu": {**CPU, "param_dtype": "bf16"},
    "cpu-every": {**CPU, **EVERY, "param_dtype": "bf16"},
    "gpu": {**GPU, "param_dtype": "bf16", "reduce_dtype": "bf16"},
}


@pytest.mark.parametrize("kind", NARROW)
@on_ranks(2)
def test_micro_batches_of_bf16_are_added_up_in_float32(group, kind) -> None:
    count, document = 8, NARROW[kind]
    one_by_one = {**document, "reduce_every_micro_batch": False}
    batches = [batch_of(0, torch.distributed.get_rank(), number) for number in range(count)]
    together = engine_of(group, document, 1e9, accumulation=count)
    alone = engine_of(group, one_by_one, 1e9, accumulation=1)
    parts = []
    for batch in batches:
        alone.step([batch], 0.0)
        # a factor of two to some power, which rounds nothing
        parts.append([part / count for part in gradients(alone, kind == "cpu-every")])
    together.step(batches, 0.0)
    for found, *each in zip(gradients(together), *parts, strict=True):
        expected, narrow = torch.zeros_like(found), torch.zeros_like(found).bfloat16()
        for part in each:
            expected += part
            narrow += part.bfloat16()
        assert found.dtype is torch.float32 and torch.equal(found, expected)
        assert not torch.equal(narrow, expected.bfloat16())


def gradients(engine, summed=False):
    """State in host memory of each unit for this rank's chunk, in float32.

    Of all ranks where each has its own, one after the other or added up.
    """
    engine.synchronize()
    parts = [[slot[unit.own].float() for slot in unit.slots] for unit in engine.units]
    found = [sum(each) if summed else torch.cat(each) for each in parts]
    torch.distributed.barrier()  # nobody writes to what others still read here
    return found


@pytest.mark.parametrize(
    "world_size, ranks_per_node",
    [(1, None), (3, None), pytest.param(4, 2, marks=pytest.mark.long)],
)
@on_ranks()
def test_sums_over_ranks_after_every_micro_batch_differ_by_rounding(
    group, world_size, ranks_per_node
) -> None:
    build = partial(engine_of, group, accumulation=2, ranks_per_node=ranks_per_node)
    expected = train(build(CPU), 2, 2)
    for document, tolerance in (CPU, 1e-5), ({**CPU, **INT8}, 2e-2):
        found = train(build({**document, **EVERY}), 2, 2)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype, itemsize", [("fp32", 4), ("bf16", 2)])
@on_ranks(2)
def test_ledger_counts_reads_from_other_ranks_memory(group, dtype, itemsize) -> None:
    moved = {}
    for count, every in (1, False), (3, False), (3, True):
        document = {**CPU, "param_dtype": dtype, "reduce_every_micro_batch": every}
        engine = engine_of(group, document, accumulation=count)
        train(engine, 1, count)
        moved[count, every] = engine.ledger.summary()["gradients"]["bytes_wire"]
    half = sum(unit.size for unit in engine.units) / 2
    assert moved == {
        (1, False): itemsize * half,
        (3, False): 4 * half,
        (3, True): 3 * itemsize * half,
    }


class CountedPins(ThrottledCopies):
    """Count the vectors that were made ready to be copied from or to."""

    def __init__(self):
        super().__init__()
        self.pins = 0

    def pin(self, tensor):
        self.pins += 1


@on_ranks(1)
def test_memory_that_units_share_is_pinned_once(group) -> None:
    copies = CountedPins()
    engine = engine_of(group, CPU, None, copies, accumulation=1, layers=LAYERS)
    assert copies.pins == len(engine.units) + 1 + 3


@on_ranks(1)
def test_more_micro_batches_than_configured_are_refused(group) -> None:
    engine = engine_of(group, CPU, accumulation=1)
    with pytest.raises(UserError, match="a step of 2 micro-batches, and host memory is laid"):
        train(engine, 1, micro=2)
    train(engine_of(group, CPU), 1, micro=2)
