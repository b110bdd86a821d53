"""Moment stores: a file gives the bits of memory, and holds three units in memory."""

import os
import random
import time
from itertools import pairwise

import pytest
import torch

from shardlab.engines.slide.moments import FileMoments, Moments, MomentStore
from shardlab.engines.slide.shared_file import NodeFile
from tests.engines.storages import alive, watch
from tests.ranks import on_ranks

SIZES = {"root": 5001, **{f"block{number}": 3000 for number in range(6)}}


class DelayedPart:
    """Takes a time of its own for everything."""

    def __init__(self, part, delays):
        self._part, self._delays = part, delays
        self.buffer, self.fits, self.inside = part.buffer, part.fits, part.inside

    def read(self, buffer):
        time.sleep(self._delays.random() * 4e-3)
        self._part.read(buffer)

    def write(self, buffer):
        time.sleep(self._delays.random() * 4e-3)
        self._part.write(buffer)


def in_memory(dtype=torch.float32):
    return MomentStore(
        {unit: Moments(*torch.zeros(2, size, dtype=dtype)) for unit, size in SIZES.items()}
    )


def in_file(group, folder, dtype=torch.float32, delays=None):
    width = dtype.itemsize
    names = {unit: (f"{unit}/m", f"{unit}/v") for unit in SIZES}
    layout = {name: SIZES[unit] * width for unit, both in names.items() for name in both}
    file = NodeFile.create(group, layout, folder)
    parts = {
        unit: [file.part(name, 0, SIZES[unit] * width) for name in both]
        for unit, both in names.items()
    }
    if delays is not None:
        parts = {unit: [DelayedPart(part, delays) for part in both] for unit, both in parts.items()}
    return FileMoments(file, parts, dtype)


def updated(store, order, steps=4):
    """All moments after some updates in which every unit is fetched ahead of its own."""
    for step in range(steps):
        for unit, following in zip(order, [*order[1:], order[0]], strict=True):
            loaded = store.load(unit)
            store.prefetch(following)
            loaded.exp_avg.mul_(0.9).add_(len(unit) + step)
            loaded.exp_avg_sq.mul_(0.99).add_(torch.arange(SIZES[unit]) * step)
            store.store(unit)
    return [tensor.clone() for unit in SIZES for tensor in store.load(unit)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("units", [1, 2, len(SIZES)])
@on_ranks(1)
def test_moments_in_a_file_are_the_bits_of_those_in_memory(group, tmp_path, dtype, units) -> None:
    order = [*SIZES][:units]
    expected = updated(in_memory(dtype), order)
    for delays in (None, random.Random(units)):
        found = updated(in_file(group, tmp_path, dtype, delays), order)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(1)
def test_memory_holds_those_of_three_units(group, tmp_path) -> None:
    moments, storages = in_file(group, tmp_path, delays=random.Random(1)), {}
    units = [*SIZES][1:] * 2  # of one size
    for unit, following in pairwise([*units, units[0]]):
        exp_avg = moments.load(unit).exp_avg
        storages[exp_avg.untyped_storage().data_ptr()] = watch(exp_avg)
        moments.prefetch(following)
        moments.store(unit)
    assert len(storages) == 3
    del exp_avg
    moments.close()
    del moments
    gone = [False] * len(storages)
    assert alive([*storages.values()], gone) == gone


@on_ranks(1)
def test_failed_io_is_raised_by_later_calls(group, tmp_path) -> None:
    moments = in_file(group, tmp_path)
    moments.load("root").exp_avg.fill_(1)
    moments.store("root")
    moments.drain()
    os.ftruncate(moments._file._cached.descriptor, 0)
    for call in (moments.load, moments.prefetch, lambda _: moments.check()):
        with pytest.raises(OSError, match=f"a file in {tmp_path} could not be read"):
            call("root")
    with pytest.raises(OSError, match="could not be read"):
        moments.close()
