"""Calls run concurrently with the caller, in order, and their errors are raised."""

import threading
from contextlib import nullcontext
from threading import get_ident

import pytest
import torch
from tests.devices.late_device import LateStream, late_cpu

from shardlab.comm.background import Background, drain_all
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def fail() -> None:
    raise RuntimeError("a rank is gone")


def test_calls_run_in_order_and_concurrently_with_the_caller():
    background, done, gate = Background("test"), [], threading.Event()

    def call(number: int) -> None:
        gate.wait(10)
        done.append((number, threading.current_thread() is threading.main_thread()))

    for number in range(5):
        background.start(call, number)
    assert done == []
    gate.set()
    background.drain()
    assert done == [(number, False) for number in range(5)]


def test_errors_are_raised_by_wait_and_drain():
    background = Background("test")
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.start(fail).wait()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.drain()
    background.start(lambda: None)
    background.drain()


def test_drain_waits_for_calls_after_an_error():
    background, gate, done = Background("test"), threading.Event(), []
    background.start(fail)
    background.start(lambda: done.append(gate.wait(10)))
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.drain()
    assert done == [True]
    background.drain()


def test_calls_use_as_many_threads_as_their_starter():
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        background = Background("test")
        background.start(lambda: found.append(torch.get_num_threads()))
        background.drain()
    finally:
        torch.set_num_threads(before)
    assert found == [1]


def test_the_thread_has_the_device_of_its_stream(monkeypatch):
    """Otherwise each rank allocates a context on the first GPU."""
    found = []
    monkeypatch.setattr(LateStream, "set_device", lambda self: found.append(get_ident()))
    with late_cpu():
        background = Background("test", CPU)
        for _ in range(2):
            background.start(lambda: found.append(get_ident())).wait()
    assert found == [found[-1]] * 3 != [get_ident()] * 3


@pytest.mark.gpu(count=2)
@on_ranks(1)  # a process that has used CUDA could not fork ranks for other tests
def test_the_thread_launches_on_the_gpu_of_its_stream(group):
    background = Background("test", torch.device("cuda", 1))
    background.start(lambda: None).wait()
    assert background._threads.submit(torch.cuda.current_device).result() == 1


@pytest.mark.parametrize("on_device", [False, True])
def test_on_a_device_calls_of_two_are_launched_in_one_order(on_device):
    """Ranks that launch collectives of two communicators in different orders can hang."""
    with late_cpu() if on_device else nullcontext():
        gathers = Background("gather", CPU)
        reductions = Background("reduce", CPU, beside=gathers)
        started, gate = [], threading.Event()

        def call(name: str) -> None:
            started.append(name)
            if name == "gather 0":
                gate.wait(10)

        first = gathers.start(call, "gather 0")
        second = reductions.start(call, "reduce 0")
        if not on_device:  # concurrently, as the host itself communicates
            second.wait()
        gate.set()
        first.wait()
        gathers.start(call, "gather 1")
        drain_all(gathers, reductions)
    assert started == ["gather 0", "reduce 0", "gather 1"]
    assert (gathers._threads is reductions._threads) == on_device
