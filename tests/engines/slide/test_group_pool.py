"""Engines of one process use process groups one after another, and never at the same time."""

import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.engines.slide.groups import GroupPool
from tests.descriptors import opened
from tests.engines.slide.small_engine import MODES, engine_of, train
from tests.engines.slide.unwatched_ranks import outcomes
from tests.ranks import on_ranks, run_ranks
from tests.standalone.test_slide_fsdp import model_of, trained

CONFIGS = {
    "full-cpu_reduce": {},
    "shard-gpu_reduce": {"param_transfer": "shard", "grad_sync": "gpu_reduce"},
    "codec": {"gradients": "int8", "clip": None},
}


def left_open(call):
    """Descriptors after each of several engines, which all ranks have left."""
    found = []
    for _ in range(3):
        call()
        gc.collect()
        dist.barrier()
        found.append(len(opened()))
    return found


@pytest.mark.parametrize("config", CONFIGS)
def test_engines_that_are_gone_leave_what_the_first_one_has_opened(config):
    def slid():
        sliding = shardlab.SlideFSDP(
            model_of("gpt2-tied"), shardlab.SlideConfig(**{"clip": 1.0, **CONFIGS[config]})
        )
        trained(sliding, 0, 2)

    def on_rank(group):
        first, *others = left_open(slid)
        assert others == [first, first]
        return {}

    run_ranks(2, on_rank)


@on_ranks(4)
def test_so_do_those_of_several_nodes(group) -> None:
    mode = MODES["shard-gpu_reduce"]
    first, *others = left_open(lambda: train(engine_of(group, mode, ranks_per_node=2), 1))
    assert others == [first, first]


@on_ranks(2)
def test_engines_that_are_alive_share_none_and_train_as_alone(group) -> None:
    mode = MODES["shard-gpu_reduce"]
    expected = train(engine_of(group, mode), 4)
    gc.collect()
    both = [engine_of(group, mode) for _ in range(2)]
    groups = [each for engine in both for each in (engine.groups.gathers, engine.groups.reductions)]
    assert len({id(each) for each in groups}) == 4
    for step in range(4):
        for engine in both:
            assert torch.equal(train(engine, 1, first=step)[0], expected[step])


@on_ranks(2)
def test_groups_that_are_free_on_some_ranks_alone_are_not_acquired(group) -> None:
    acquire = partial(GroupPool().acquire, group)
    first = acquire("a", object)
    if dist.get_rank(group) == 0:
        first.release()
    assert acquire("a", object) is not first
    first.release()
    assert acquire("b", object) is not first
    assert acquire("a", object) is first
    first.discard()
    first.release()
    assert acquire("a", object) is not first


def test_nothing_is_kept_of_a_run_that_has_ended():
    def run_again(_):
        found = []
        for _ in range(3):
            if dist.is_initialized():
                dist.destroy_process_group()
            sliding = shardlab.SlideFSDP(model_of("gpt2-tied"))
            trained(sliding, 0, 1)
            sliding.synchronize()
            del sliding
            gc.collect()
            found.append(len(opened()))
        return len(set(found))

    assert outcomes(1, run_again) == ["1"]
