"""Counters that processes share."""

import mmap
import random
import threading

import pytest
import torch

from shardlab.kernels import native
from shardlab.kernels.shared_counters import BYTES, SharedCounters
from tests.ranks import run_ranks


@pytest.fixture(params=["", "reference"], autouse=True)
def kernels(request, monkeypatch):
    """Compiled where there is a library, and not."""
    monkeypatch.setenv("SHARDLAB_KERNELS", request.param)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def shared(count, room=0):
    """Counters in memory that forked ranks share, and that memory."""
    memory = mmap.mmap(-1, count * BYTES + room)
    return SharedCounters(memory, 0, count), memory


def test_a_counter_is_zero_then_what_was_published():
    words, _ = shared(3)
    words.publish(1, 7)
    assert [words.read(index) for index in range(3)] == [0, 7, 0]


def test_a_later_value_is_enough_and_an_earlier_one_is_not():
    words, _ = shared(1)
    words.publish(0, 5)
    assert words.wait(0, 4, 0.0)
    assert words.wait(0, 5, 0.0)
    assert not words.wait(0, 6, 0.01)


def test_the_largest_value_arrives():
    words, _ = shared(1)
    words.publish(0, 2**31 - 1)
    assert words.wait(0, 2**31 - 1, 0.0)


def test_a_thread_may_publish_what_another_one_awaits():
    """It could not, if waiting kept the interpreter to itself."""
    words, _ = shared(1)
    seen = []
    waiting = threading.Thread(target=lambda: seen.append(words.wait(0, 1, 30.0)))
    waiting.start()
    words.publish(0, 1)
    waiting.join()
    assert seen == [True]


def test_every_waiting_process_is_woken():
    words, _ = shared(2)

    def on_rank(group):
        if group.rank() == 0:
            words.publish(0, 1)
        return {"seen": torch.tensor(words.wait(0, 1, 30.0))}

    assert all(result["seen"] for result in run_ranks(4, on_rank))


def test_what_was_written_before_is_seen_after():
    """Rounds of random length: everyone reads what the writer of the round wrote, then says so."""
    ranks, rounds, room = 3, 1500, 1 << 14
    words, memory = shared(2 * ranks, room)
    data = torch.frombuffer(memory, dtype=torch.int32, offset=2 * ranks * BYTES)
    seed = random.randrange(1 << 30)

    def on_rank(group):
        me, plan = group.rank(), random.Random(seed)
        torch.set_num_threads(1)
        for number in range(1, rounds + 1):
            writer, size = plan.randrange(ranks), plan.randrange(1, len(data))
            if me == writer:
                data[:size] = number
                words.publish(me, number)
            assert words.wait(writer, number, 30.0)
            assert data[:size].eq(number).all(), f"seed {seed}, round {number}"
            words.publish(ranks + me, number)
            for other in range(ranks):
                assert words.wait(ranks + other, number, 30.0)
        return {}

    run_ranks(ranks, on_rank)


def test_the_memory_lives_as_long_as_its_counters():
    words, memory = shared(1)
    del memory
    words.publish(0, 1)
    assert words.read(0) == 1
