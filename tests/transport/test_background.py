"""Calls run beside the caller, in order, and their errors are not lost."""

import threading

import pytest
import torch

from shardlab.transport.background import Background


def test_calls_run_in_the_order_in_which_they_were_started_and_beside_the_caller():
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


def test_an_error_reaches_whoever_waits():
    def fail() -> None:
        raise RuntimeError("a rank is gone")

    background = Background("test")
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.start(fail).wait()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.drain()
    background.start(lambda: None)
    background.drain()


def test_after_an_error_the_calls_that_follow_are_waited_for_too():
    def fail() -> None:
        raise RuntimeError("a rank is gone")

    background, gate, done = Background("test"), threading.Event(), []
    background.start(fail)
    background.start(lambda: done.append(gate.wait(10)))
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.drain()
    assert done == [True]
    background.drain()


def test_a_call_has_as_many_threads_as_its_starter():
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
