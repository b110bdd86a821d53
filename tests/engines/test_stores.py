"""Stores return tensors as they were; free space is merged and reused."""

import math
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.engines.activation_storage import Allocation, FreeList, HostStorage
from shardlab.engines.activation_stores import ActivationStore, FileStore, HostStore
from tests.engines.storages import alive, watch

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn),
    *(torch.uint8, torch.int64, torch.bool, torch.complex64),
]


@pytest.fixture(scope="module", params=["host", "file"])
def store(request, tmp_path_factory):
    made = HostStore() if request.param == "host" else FileStore(tmp_path_factory.mktemp("store"))
    yield made
    made.close()


def random_bits(shape, dtype):
    width = torch.empty((), dtype=dtype).element_size()
    bits = torch.randint(256, (math.prod(shape) * width,), dtype=torch.uint8)
    return (bits % 2 if dtype is torch.bool else bits).view(dtype).view(shape)


def same(a, b):
    flat = [each.as_strided((each.numel(),), (1,)).view(torch.uint8) for each in (a, b)]
    return (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) and torch.equal(*flat)


class Rough(HostStorage):
    """Host memory whose every access takes another time, up to some milliseconds."""

    def __init__(self, seed):
        super().__init__(CPU)
        self.seed = seed

    def allocate(self, size):
        return RoughAllocation(super().allocate(size), random.Random(self.seed))


class RoughAllocation(Allocation):
    def __init__(self, allocation, delays):
        self.allocation, self.delays = allocation, delays

    def write(self, source):
        time.sleep(self.delays.random() / 200)
        self.allocation.write(source)

    def read(self, out):
        time.sleep(self.delays.random() / 200)
        self.allocation.read(out)

    def free(self):
        self.allocation.free()


class Gated(HostStorage):
    """Host memory that takes nothing before the gate opens."""

    def __init__(self):
        super().__init__(CPU)
        self.gate = threading.Event()

    def allocate(self, size):
        allocation, write = super().allocate(size), None
        write = allocation.write

        def wait_and_write(source):
            self.gate.wait(20)
            write(source)

        allocation.write = wait_and_write
        return allocation


@settings(deadline=None)
@given(
    shape=st.lists(st.integers(0, 33), min_size=1, max_size=3),
    dtype=st.sampled_from(DTYPES),
    turned=st.booleans(),
)
def test_every_shape_dtype_and_stride_round_trips(store, shape, dtype, turned):
    tensor = random_bits(shape, dtype)
    tensor = tensor.transpose(0, -1) if turned else tensor
    storeds = [store.put(tensor) for _ in range(4)]
    for stored in storeds:
        assert same(store.take(stored), tensor)
        store.drop(stored)


def test_tensors_of_several_chunks_round_trip(store):
    tensor = random_bits([(17 << 20) + 5], torch.uint8)
    first, *_ = [store.put(tensor) for _ in range(4)]
    assert same(store.take(first), tensor)


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_threads_changes_a_bit(seed):
    store, choose, held = ActivationStore(Rough(seed)), random.Random(seed), []
    for number in range(60):
        held.append((number, store.put(torch.full((1000 + number,), float(number)))))
        for _, stored in choose.sample(held, min(2, len(held))):
            store.prefetch(stored)
        while len(held) > 5:
            number, stored = held.pop(choose.randrange(len(held)))
            if choose.random() < 0.7:
                assert store.take(stored).unique().tolist() == [number]
            store.drop(stored)
    store.close()


def test_a_tensor_is_held_until_it_has_left_and_no_longer():
    storage = Gated()
    store, tensors = ActivationStore(storage), [torch.ones(1000) for _ in range(2)]
    storages = [*map(watch, tensors)]
    storeds = [store.put(tensors.pop()) for _ in range(2)]
    assert alive(storages, [True] * 2) == [True] * 2
    storage.gate.set()
    storeds += [store.put(torch.zeros(1000)) for _ in range(2)]
    assert alive(storages, [False] * 2) == [False] * 2
    assert [store.take(stored).sum() for stored in storeds] == [1000, 1000, 0, 0]


def test_a_slow_storage_makes_the_computation_wait_and_holds_no_more_memory():
    storage = Gated()
    store = ActivationStore(storage)
    for _ in range(2):
        store.put(torch.ones(10))
    third = threading.Thread(target=store.put, args=(torch.ones(10),))
    third.start()
    third.join(0.2)
    assert third.is_alive()
    storage.gate.set()
    third.join()


def test_tensor_not_yet_written_is_returned_at_once():
    store = ActivationStore(Gated())
    tensor = torch.arange(9.0)
    taken = store.take(store.put(tensor))
    assert taken.data_ptr() == tensor.data_ptr()
    store._storage.gate.set()


def test_write_during_offload_is_refused(store):
    tensor = torch.ones(10)
    stored = store.put(tensor)
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        store.take(stored)
    with pytest.raises(RuntimeError, match="changed in place"):
        for _ in range(2):
            store.put(torch.ones(10))


def test_file_space_is_reused_by_tensors_of_any_size(tmp_path):
    store, largest = FileStore(tmp_path), 0
    for step in range(5):
        sizes = [5000 * (1 + (step + layer) % 3) for layer in range(8)]
        for stored in [store.put(torch.ones(size)) for size in sizes]:
            store.take(stored)
            store.drop(stored)
        store._out.drain()
        largest = max(largest, sum(-(-4 * size // 4096) * 4096 for size in sizes))
    assert store._storage.space.end <= largest


def allocate(space: FreeList, size: int) -> tuple[int, int]:
    start = space.allocate(size)
    if start is None:
        space.grow(space.lacking(size))
        start = space.allocate(size)
    assert start is not None
    return start, size


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40), st.randoms())
def test_parts_never_overlap_and_become_one_again(requests, random):
    space, held = FreeList(), []
    for size, dropped in requests:
        held.append(allocate(space, size))
        taken = [place for start, length in held for place in range(start, start + length)]
        assert len(taken) == len({*taken}) and max(taken) < space.end
        for _ in range(min(dropped, len(held))):
            space.free(*held.pop(random.randrange(len(held))))
    for part in held:
        space.free(*part)
    if space.end:
        assert space.allocate(space.end) == 0


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), min_size=1, max_size=5))
def test_the_range_is_as_large_as_the_largest_step(steps):
    space = FreeList()
    for sizes in steps:
        for part in [allocate(space, size) for size in sizes]:
            space.free(*part)
    assert space.end == max(map(sum, steps))
