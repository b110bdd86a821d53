"""Ranks that share memory, and process groups that engines use one after another."""

import gc
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.comm.emulated_link import Links
from shardlab.config.link import Link
from shardlab.core.errors import UserError
from shardlab.engines.slide.groups import GroupPool, node_groups
from shardlab.engines.slide.shared_memory import NodeMemory
from tests.descriptors import opened
from tests.engines.small_engine import MODES, engine_of, train
from tests.engines.slide.unwatched_ranks import outcomes
from tests.engines.sliding_factory import model_of, trained
from tests.ranks import on_ranks, run_ranks

pytestmark = pytest.mark.fresh_ranks


@pytest.fixture
def links():
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Links(4, Link(rate="1gbit")))
        except UserError as error:
            pytest.skip(str(error))


def members(group, ranks_per_node=None):
    """The ranks here and across, as the run numbers them; across is empty for one node."""
    here, across = node_groups(group, ranks_per_node)
    assert dist.get_backend(here) == "gloo"
    return tuple(
        [] if each is None else dist.get_process_group_ranks(each) for each in (here, across)
    )


@pytest.mark.parametrize("world_size", [1, 3])
@on_ranks()
def test_ranks_of_one_machine_are_one_node(group, world_size) -> None:
    assert members(group) == ([*range(world_size)], [])


@on_ranks(4)
def test_consecutive_ranks_are_a_node_where_the_user_says_so(group) -> None:
    expected = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert members(group, 2) == expected[dist.get_rank(group)]


def test_emulated_links_lead_from_node_to_node_and_ranks_may_share_memory_across(links):
    def on_rank(group):
        rank = dist.get_rank(group)
        assert members(group) == ([rank], [0, 1, 2, 3])
        here, _ = node_groups(group, ranks_per_node=2)
        memory = NodeMemory.create(here, {"all": 8}, 1, 30.0)
        shared = memory.tensor("all", torch.int32, (2,))
        shared[dist.get_rank(here)] = rank + 1
        memory.progress.publish("offloaded", 0, 1)
        memory.progress.wait("offloaded", 0, 1)
        memory.close()
        assert shared.tolist() == ([1, 2] if rank < 2 else [3, 4])
        dist.barrier(group)  # no rank ends while one of another node connects to it

    run_ranks(4, on_rank, links=links)


@on_ranks(3)
def test_a_part_of_the_run_has_nodes_of_its_own(group) -> None:
    if dist.get_rank(group) > 0:
        part = dist.new_group([1, 2], use_local_synchronization=True)
        assert members(part) == ([1, 2], [])


def test_unequal_nodes_are_refused():
    reported = outcomes(3, lambda group: node_groups(group, 2))
    assert reported == ["UserError: slide: nodes of 2, 1 ranks: start equally many on each"] * 3


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


@pytest.mark.parametrize(
    "config",
    [pytest.param(name, marks=() if name == "codec" else pytest.mark.long) for name in CONFIGS],
)
@on_ranks(2)
def test_later_engines_reuse_the_descriptors_of_the_first(config) -> None:
    def slid():
        sliding = shardlab.SlideFSDP(
            model_of("gpt2-tied"), shardlab.SlideConfig(**{"clip": 1.0, **CONFIGS[config]})
        )
        trained(sliding, 0, 2)

    first, *others = left_open(slid)
    assert others == [first, first]


@on_ranks(4)
def test_later_engines_of_several_nodes_reuse_descriptors(group) -> None:
    mode = MODES["shard-gpu_reduce"]
    first, *others = left_open(lambda: train(engine_of(group, mode, ranks_per_node=2), 1))
    # fewer where a collection closes what was inherited from the process that forked the ranks
    assert max(others) <= first


@on_ranks(2)
def test_concurrent_engines_share_no_groups_and_train_independently(group) -> None:
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
def test_groups_free_on_some_ranks_only_are_not_acquired(group) -> None:
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


def test_groups_of_a_finished_run_are_dropped():
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
