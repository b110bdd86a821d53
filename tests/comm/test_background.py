"""Calls run concurrently with the caller, in order, and their errors are raised."""

import threading

import pytest
import torch

from shardlab.comm.background import Background


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
    background.wait()
    assert done == [(number, False) for number in range(5)]


def test_errors_are_raised_by_every_wait():
    background = Background("test")
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.start(fail).wait()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        background.wait()
    background.start(lambda: None)
    background.wait()


def test_calls_use_as_many_threads_as_their_starter():
    found = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        background = Background("test")
        background.start(lambda: found.append(torch.get_num_threads()))
        background.wait()
    finally:
        torch.set_num_threads(before)
    assert found == [1]
