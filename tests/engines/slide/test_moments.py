"""Moments in a file are those in memory, and memory holds few of them."""

import os

import pytest
import torch

from shardlab.core.errors import UserError
from shardlab.engines.slide.moments import FileMoments, MemoryMoments
from tests.engines.activations.storages import alive, watch

SIZES = {"root": 5001, **{f"block{number}": 3000 for number in range(6)}}


@pytest.fixture
def moments(tmp_path):
    made = FileMoments(SIZES, tmp_path)
    yield made
    made.close()


def updated(store, steps=4):
    """All moments after some updates in which every unit is fetched ahead of its own."""
    units = [*SIZES]
    for step in range(steps):
        for unit, following in zip(units, [*units[1:], units[0]], strict=True):
            loaded = store.load(unit)
            store.prefetch(following)
            loaded.exp_avg.mul_(0.9).add_(len(unit) + step)
            loaded.exp_avg_sq.mul_(0.99).add_(torch.arange(SIZES[unit]) * step)
            store.store(unit)
    return [tensor.clone() for unit in units for tensor in store.load(unit)]


def test_moments_in_a_file_are_the_bits_of_those_in_memory(moments):
    expected = updated(MemoryMoments(SIZES))
    assert all(torch.equal(a, b) for a, b in zip(updated(moments), expected, strict=True))


def test_what_was_stored_is_no_longer_in_memory(moments):
    storages = []
    for unit in SIZES:
        storages.append(watch(moments.load(unit).exp_avg))
        moments.store(unit)
    moments._out.drain()
    gone = [False] * len(SIZES)
    assert alive(storages, gone) == gone


def test_a_disk_that_cannot_hold_all_is_told_before_training(tmp_path):
    free = os.statvfs(tmp_path)
    sizes = {"root": free.f_frsize * free.f_blocks}
    with pytest.raises(UserError, match="more bytes do not fit"):
        FileMoments(sizes, tmp_path)


def test_moments_that_did_not_come_are_told(tmp_path):
    moments = FileMoments(SIZES, tmp_path)
    moments.load("root").exp_avg.fill_(1)
    moments.store("root")
    moments._out.drain()
    os.ftruncate(moments._medium._file, 0)
    for call in (moments.load, moments.prefetch):
        with pytest.raises(OSError, match="could not be read"):
            call("root")
    with pytest.raises(OSError, match="could not be read"):
        moments.close()
