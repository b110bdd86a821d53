"""Copies between host and device."""

import pytest
import torch

from shardlab.core.device import moved
from tests.ranks import on_ranks


@pytest.mark.gpu
@on_ranks(1)  # a process that has used CUDA could not fork ranks for other tests
def test_page_locked_memory_may_be_written_to_once_it_was_moved(group):
    device = torch.device("cuda")
    busy = torch.ones(4096, 4096, device=device)
    for _ in range(50):
        busy = (busy @ busy) / 4096
    batch = torch.ones(1000, dtype=torch.int64).pin_memory()
    copied = moved(batch, device)
    batch.zero_()
    assert bool((copied == 1).all())
