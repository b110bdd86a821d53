"""Ranks that share memory, and process groups that engines use one after another."""

import gc
from contextlib import ExitStack
from functools import partial

import pytest
import torch
import torch.distributed as dist

import shardlab
from shardlab.core.errors import UserError
from shardlab.emulation.link import Links
from shardlab.engines.slide.groups import GroupPool, node_groups
from shardlab.engines.slide.shared_memory import NodeMemory
from shardlab.experiment.link import Link
from tests.descriptors import opened
from tests.engines.slide.small_engine import MODES, engine_of, train
from tests.engines.slide.unwatched_ranks import outcomes
from tests.ranks import on_ranks, run_ranks
from tests.standalone.sliding_factory import model_of, trained


@pytest.fixture
def links():
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Links(4, Link(rate="1gbit")))
        except UserError as error:
            pytest.skip(str(error))


def members(ranks_per_node=None):
    """The ranks here and across, as the run numbers them; across is empty for one node."""

    def on_rank(group):
        here, across = node_groups(group, ranks_per_node)
        assert dist.get_backend(here) == "gloo"
        others = [] if across is None else dist.get_process_group_ranks(across)
        return {
            "here": torch.tensor(dist.get_process_group_ranks(here)),
            "across": torch.tensor(others, dtype=torch.int64),
        }

    return on_rank


def lists(results):
    return [(result["here"].tolist(), result["across"].tolist()) for result in results]


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_of_one_machine_are_one_node(world_size):
    expected = [([*range(world_size)], [])] * world_size
    assert lists(run_ranks(world_size, members())) == expected


def test_consecutive_ranks_are_a_node_where_the_user_says_so():
    expected = [([0, 1], [0, 2]), ([0, 1], [1, 3]), ([2, 3], [0, 2]), ([2, 3], [1, 3])]
    assert lists(run_ranks(4, members(2))) == expected


def test_emulated_links_lead_from_node_to_node(links):
    results = run_ranks(4, members(), links=links)
    assert lists(results) == [([rank], [0, 1, 2, 3]) for rank in range(4)]


def test_ranks_share_memory_though_emulated_links_lie_between_them(links):
    def on_rank(group):
        here = node_groups(group, ranks_per_node=2).here
        memory = NodeMemory.create(here, {"all": 8}, 1, 30.0)
        shared = memory.tensor("all", torch.int32, (2,))
        shared[dist.get_rank(here)] = dist.get_rank(group) + 1
        memory.progress.publish("offloaded", 0, 1)
        memory.progress.wait("offloaded", 0, 1)
        memory.close()
        return {"shared": shared}

    results = run_ranks(4, on_rank, links=links)
    assert [result["shared"].tolist() for result in results] == [[1, 2], [1, 2], [3, 4], [3, 4]]


def test_a_part_of_the_run_has_nodes_of_its_own():
    def on_rank(group):
        if dist.get_rank(group) == 0:
            return {}
        part = dist.new_group([1, 2], use_local_synchronization=True)
        return {"here": torch.tensor(dist.get_process_group_ranks(node_groups(part).here))}

    assert [r["here"].tolist() for r in run_ranks(3, on_rank)[1:]] == [[1, 2], [1, 2]]


def test_unequal_nodes_are_refused():
    told = outcomes(3, lambda group: node_groups(group, 2))
    assert told == ["UserError: slide: nodes of 2, 1 ranks: start equally many on each"] * 3


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
@on_ranks(2)
def test_engines_that_are_gone_leave_what_the_first_one_has_opened(config) -> None:
    def slid():
        sliding = shardlab.SlideFSDP(
            model_of("gpt2-tied"), shardlab.SlideConfig(**{"clip": 1.0, **CONFIGS[config]})
        )
        trained(sliding, 0, 2)

    first, *others = left_open(slid)
    assert others == [first, first]


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
