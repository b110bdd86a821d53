"""Engines whose copies of the model train alone between exchanges."""

import pytest
import torch
import torch.distributed as dist

from shardlab.train.outputs import check_replicas
from tests.comm.wire import is_same_everywhere
from tests.engines.engine_cases import batch_of, make
from tests.ranks import on_ranks
from tests.whole_parameters import whole_parameters

INT4 = {"codec": "int4:group=64", "error_feedback": True}
RARE = {
    "ddp": {"engine": "ddp", "sync": {"every": 2}},
    "fsdp2": {"engine": "fsdp2", "sharding": "no_shard", "sync": {"every": 2}},
    "manual": {"engine": "manual", "sharding": "no_shard", "sync": {"every": 2}},
    "fsdp2-int4": {"engine": "fsdp2", "sharding": "no_shard", "sync": {"every": 2, **INT4}},
}


def steps(engine, group, first, count):
    rank = dist.get_rank(group)
    return [
        engine.step([batch_of(step, 0, rank)], 1e-3).loss for step in range(first, first + count)
    ]


@pytest.mark.parametrize("name", RARE)
@on_ranks(2)
def test_copies_differ_between_exchanges_and_end_equal(group, name) -> None:
    engine = make(group, RARE[name])
    copies = []
    for step in range(3):
        steps(engine, group, step, 1)
        check_replicas(engine, step, group)  # of what all agree on
        parameters = [p.detach().flatten() for p in engine.module.parameters()]
        flat = torch.cat([p.to_local() if hasattr(p, "to_local") else p for p in parameters])
        copies.append(is_same_everywhere(flat, group))
    assert copies == [False, True, False]
    engine.synchronize()
    assert all(is_same_everywhere(p, group) for p in whole_parameters(engine).values())


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "manual"])
@on_ranks(2)
def test_a_copy_trains_as_one_device_alone(group, engine) -> None:
    alone = dist.new_group([dist.get_rank(group)], use_local_synchronization=True)
    expected = steps(make(alone, {"engine": "ddp"}), group, 0, 3)
    losses = steps(make(group, {**RARE[engine], "sync": {"every": 9}}), group, 0, 3)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("engine", ["fsdp2", "manual"])
@on_ranks(4)
def test_shards_of_two_copies_train_as_two_ranks(group, engine) -> None:
    """Exchanges of two copies on four ranks and on two: each copy has the same samples."""
    rank = dist.get_rank(group)
    hybrid = {"engine": engine, "sharding": "hybrid_shard", "replicas": 2, "sync": {"every": 2}}
    one = make(group, hybrid)
    losses = [one.step([batch_of(step, 0, rank // 2)], 1e-3).loss for step in range(4)]
    ranks = [rank % 2, rank % 2 + 2]
    pair = dist.new_group(ranks, use_local_synchronization=True)
    other = make(pair, RARE["ddp"])
    expected = [other.step([batch_of(step, 0, rank // 2)], 1e-3).loss for step in range(4)]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
