"""Host memory of `slide`."""

import mmap

import pytest
import torch

from shardlab.engines.slide_memory import own_vectors, shared_vectors
from tests.ranks import on_ranks

LAYOUT = {"none": (torch.float32, 0), "one": (torch.bfloat16, 1), "more": (torch.float32, 5000)}


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_vectors_lie_on_pages_of_their_own(group, world_size):
    # what is page-locked shares no page with anything else
    for memory, vectors in (own_vectors(LAYOUT), shared_vectors(LAYOUT, group)):
        ends = [memory.data_ptr(), memory.data_ptr() + memory.nbytes]
        assert all(end % mmap.PAGESIZE == 0 for end in ends)
        assert all(vector.data_ptr() % mmap.PAGESIZE == 0 for vector in vectors.values())
        assert {n: (v.dtype, v.numel()) for n, v in vectors.items()} == LAYOUT
        assert not any(vector.any() for vector in vectors.values())


def test_host_memory_is_that_of_the_host_whatever_the_default_device_is():
    with torch.device("meta"):
        memory, _ = own_vectors(LAYOUT)
    assert memory.device.type == "cpu"
