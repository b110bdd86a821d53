"""Counters in shared memory."""

import mmap
import random
import threading

import pytest
import torch

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.shared_counters import BYTES, SharedCounters
from tests.ranks import run_ranks


@pytest.fixture(params=["", "reference"], autouse=True)
def kernels(request, monkeypatch):
    """Run compiled, where there is a library, and by the reference."""
    monkeypatch.setenv("SHARDLAB_KERNELS", request.param)
    native.library.cache_clear()
    yield
    native.library.cache_clear()


def shared(count, extra=0):
    """Return counters in memory that forked ranks share, and that memory."""
    memory = mmap.mmap(-1, count * BYTES + extra)
    return SharedCounters(memory, 0, count), memory


def test_counter_is_zero_until_published():
    words, _ = shared(3)
    words.publish(1, 7)
    assert [words.read(index) for index in range(3)] == [0, 7, 0]


def test_wait_returns_at_the_value_or_a_later_one():
    words, _ = shared(1)
    words.publish(0, 5)
    assert words.wait(0, 4, 0.0)
    assert words.wait(0, 5, 0.0)
    assert not words.wait(0, 6, 0.01)


def test_largest_value_is_published():
    words, _ = shared(1)
    words.publish(0, 2**31 - 1)
    assert words.wait(0, 2**31 - 1, 0.0)


def test_thread_may_publish_while_another_waits():
    """Waiting releases the interpreter lock."""
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


def test_writes_before_a_publication_are_visible_after_it():
    """Write from random ranks in turn; all others read and acknowledge."""
    ranks, rounds, size = 3, 1500, 1 << 14
    words, memory = shared(2 * ranks, size)
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


def test_counters_keep_their_memory_alive():
    words, memory = shared(1)
    del memory
    words.publish(0, 1)
    assert words.read(0) == 1
