"""Ranks that hang or are stopped are named by the ranks that time out."""

import signal
import time
from contextlib import ExitStack
from threading import Timer

import pytest
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Links
from shardlab.config.link import Link
from shardlab.core.errors import UserError
from shardlab.train import local_ranks as local
from shardlab.train.launch import RunFailed, launch
from tests.train.workers import one_dies


@pytest.fixture
def links():
    with ExitStack() as stack:
        try:
            yield stack.enter_context(Links(3, Link(rate="1gbit")))
        except UserError as error:
            pytest.skip(str(error))


world_sizes = pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])


@world_sizes
def test_a_stopped_rank_is_named(world_size):
    with pytest.raises(RunFailed, match=r"^crash: rank 1: stopped by a signal: rank [^\n]*$"):
        launch(one_dies(1, signal.SIGSTOP), world_size, 1, timeout_s=2)


@pytest.mark.long
def test_busy_rank_is_named_when_others_time_out(monkeypatch):
    monkeypatch.setattr(local, "TIMEOUTS_S", 2.0)

    def worker(group):
        if dist.get_rank(group) == 1:
            time.sleep(60)
        dist.all_reduce(torch.ones(1000), group=group)

    with pytest.raises(RunFailed, match=r"^crash: rank 1: neither at an end nor in touch: rank"):
        launch(worker, 3, 1, timeout_s=2)


@pytest.mark.long
@world_sizes
def test_rank_with_a_cut_link_is_named(links, world_size):
    def worker(group):
        for number in range(100):
            if number == 3 and dist.get_rank(group) == 1:
                links.cut(1)
            dist.all_reduce(torch.ones(1000), group=group)

    with pytest.raises(RunFailed, match=r"^crash: rank 1: its link is cut: [^\n]*$"):
        launch(worker, world_size, 1, timeout_s=3, links=links)


def test_a_link_that_is_fixed_in_time_is_no_failure(links):
    def worker(group):
        total = torch.ones(1000)
        if dist.get_rank(group) == 1:
            links.cut(1)
            Timer(0.5, links.fix, [1]).start()
        dist.all_reduce(total, group=group)
        assert total.eq(3).all()

    launch(worker, 3, 1, timeout_s=30, links=links)
