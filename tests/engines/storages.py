"""Lifetime of the storages of tensors."""

import time

from torch.multiprocessing.reductions import StorageWeakRef


def watch(tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def alive(storages, expected) -> list[bool]:
    """Return those that are there, once as expected; a thread drops its own after its call."""
    end = time.monotonic() + 10
    while (found := [not each.expired() for each in storages]) != expected:
        if time.monotonic() > end:
            break
        time.sleep(0.001)
    return found
