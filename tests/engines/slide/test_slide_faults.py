"""An error in a thread or on another rank ends the run, with its cause."""

import gc
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.engines.slide import optimizer
from shardlab.engines.slide_transfers import ThrottledCopies
from shardlab.train.launch import RunFailed, launch
from tests.descriptors import SHARED, opened
from tests.engines.small_engine import MODES, DelayedCopies, batch_of, engine_of, train
from tests.engines.slide.unwatched_ranks import outcomes
from tests.ranks import on_ranks

pytestmark = pytest.mark.fresh_ranks


class FailingCopies(ThrottledCopies):
    """Works so many times."""

    def __init__(self, good):
        super().__init__()
        self._good = good

    def copy(self, target, source):
        self._good -= 1
        if self._good < 0:
            raise OSError("the link is down")
        super().copy(target, source)


@pytest.mark.parametrize("good", [0, 3, 17, 40])
@on_ranks(2)
def test_an_error_of_a_copy_ends_the_step_on_all_ranks(group, good) -> None:
    mine = dist.get_rank(group) == 1
    copies = FailingCopies(good) if mine else ThrottledCopies()
    engine = engine_of(group, MODES["full-cpu_reduce"], copies=copies)
    error, reported = (OSError, "the link is down") if mine else (RuntimeError, "rank 1: the link")
    with pytest.raises(error, match=reported):
        train(engine, 8)
    with pytest.raises(error, match=reported):
        engine.step([batch_of(0, 0)], 1e-3)


class LosingCopies(ThrottledCopies):
    """Fails for the next part of a gradient alone, once it is asked to."""

    lose = False

    def copy(self, target, source):
        if self.lose and threading.current_thread().name.startswith("out"):
            self.lose = False
            raise OSError("the link is down")
        super().copy(target, source)


@on_ranks(1)
def test_a_unit_is_not_updated_when_a_part_of_its_gradients_is_lost(group) -> None:
    copies = LosingCopies()
    engine = engine_of(group, {"engine": "slide"}, None, copies)
    train(engine, 1)
    engine.synchronize()
    last = engine.units[-1].vectors["parameter"]
    before, copies.lose = last.clone(), True
    with pytest.raises(OSError, match="the link is down"):
        train(engine, 2)
    with suppress(OSError):
        engine._optimizer.drain()
    assert torch.equal(last, before)


@pytest.mark.parametrize("good", [3, 40])
@on_ranks(2)
def test_failed_and_deleted_engine_leaves_no_descriptors_open(group, monkeypatch, good) -> None:
    unheard = []
    monkeypatch.setattr(sys, "unraisablehook", unheard.append)
    copies = FailingCopies(good) if dist.get_rank(group) == 1 else ThrottledCopies()
    engine = engine_of(group, MODES["full-cpu_reduce"], copies=copies)
    gone = weakref.ref(engine)
    with pytest.raises((OSError, RuntimeError)):
        train(engine, 8)
    del engine, copies
    gc.collect()
    assert gone() is None
    assert opened(*SHARED) == [] and not unheard


@on_ranks(1)
def test_unraised_error_is_reported_when_the_engine_is_deleted(group, monkeypatch) -> None:
    def broken(*_, **__):
        raise ValueError("no such optimizer")

    reported = []
    monkeypatch.setattr(sys, "unraisablehook", lambda given: reported.append(str(given.exc_value)))
    engine = engine_of(group, MODES["full-cpu_reduce"])
    monkeypatch.setattr(optimizer, "adam_", broken)
    train(engine, 1)
    del engine
    gc.collect()
    assert reported == ["no such optimizer"] and opened(*SHARED) == []


@on_ranks(1)
def test_an_error_of_an_update_is_raised_by_the_next_call(group, monkeypatch) -> None:
    def broken(*_, **__):
        raise ValueError("no such optimizer")

    engine = engine_of(group, MODES["full-cpu_reduce"])
    train(engine, 1)
    monkeypatch.setattr(optimizer, "adam_", broken)
    with pytest.raises(ValueError, match="no such optimizer"):
        train(engine, 2)
    with pytest.raises(ValueError, match="no such optimizer"):
        engine.synchronize()


@pytest.mark.parametrize("mode", ["full-cpu_reduce", "shard-gpu_reduce"])
def test_killed_rank_ends_all_ranks_and_leaves_no_files(mode):
    def worker(group):
        engine = engine_of(group, MODES[mode])
        train(engine, 2)
        # other processes of the machine have files of their own there
        mapped = Path("/proc/self/maps").read_text().splitlines()
        named = [line for line in mapped if "/dev/shm/" in line and "(deleted)" not in line]
        assert not named, "what has a name would be left behind"
        if dist.get_rank(group) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        train(engine, 2)

    with pytest.raises(RunFailed, match="rank 1 was killed by signal 9"):
        launch(worker, 3, threads=1, timeout_s=30)


@on_ranks(2)
def test_nonfinite_gradient_without_clipping_ends_the_run(group) -> None:
    engine = engine_of(group, MODES["full-cpu_reduce"], clip=None)
    train(engine, 1)

    def spoil(module, inputs, output):
        output.logits = output.logits * (torch.nan if dist.get_rank(group) == 0 else 1.0)
        return output

    engine.module.register_forward_hook(spoil)
    with pytest.raises(UserError, match="or set clip"):
        train(engine, 1)


class UnpinnableCopies(DelayedCopies):
    """Host memory of one rank cannot be prepared for copies."""

    def pin(self, tensor):
        raise RuntimeError("cudaErrorMemoryAllocation\nof host memory")


def test_out_of_memory_on_one_rank_is_raised_on_all():
    def function(group):
        copies = UnpinnableCopies(0) if group.rank() == 1 else DelayedCopies(0)
        engine_of(group, MODES["full-cpu_reduce"], copies=copies)

    line, other = outcomes(2, function)
    assert line == other
    assert line == (
        "UserError: slide: host memory cannot take the model "
        "(rank 1: cudaErrorMemoryAllocation of host memory)"
    )
