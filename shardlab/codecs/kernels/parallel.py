"""Execution of kernels over ranges of a vector, on as many threads as torch uses."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

_WORTH_A_THREAD = 1 << 16
"""elements; for fewer a thread costs more than it saves"""

_RANGE = 1 << 18
"""most elements of a range: small enough that a thread that other work slows down runs fewer"""

_Item = TypeVar("_Item")


def for_ranges(n: int, multiple: int, kernel: Callable[[int, int], None]) -> None:
    """Call `kernel(start, stop)` on ranges that partition [0, n), on as many threads as torch uses.

    Compiled kernels release the interpreter lock, so the ranges run in parallel.

    Args:
        multiple: every range but the last starts and stops at a multiple of it.
    """
    threads = len(ranges(n, multiple))
    if threads < 2:
        kernel(0, n)
        return
    size = -(-min(_RANGE, -(-n // threads)) // multiple) * multiple
    starts = iter(range(0, n, size))

    def work() -> None:
        for start in starts:
            kernel(start, min(start + size, n))

    later = [_pool().submit(work) for _ in range(threads - 1)]
    work()
    for future in later:
        # all ranges are taken by now, so one that has not begun would find none
        if not future.cancel():
            future.result()


def ranges(n: int, multiple: int) -> list[tuple[int, int]]:
    """Return the (start, stop) that partition [0, n), one for each thread that speeds it up."""
    threads = min(torch.get_num_threads(), n // max(_WORTH_A_THREAD, multiple))
    if threads < 2:
        return [(0, n)]
    size = -(-n // (threads * multiple)) * multiple
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def for_each(items: Sequence[_Item], kernel: Callable[[_Item], None]) -> None:
    """Call `kernel(item)` for each item (at least one), in parallel on as many threads as torch."""
    if torch.get_num_threads() < 2:
        for item in items:
            kernel(item)
        return
    later = [_pool().submit(kernel, item) for item in items[1:]]
    kernel(items[0])
    for future in later:
        future.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "shardlab-kernel")


# since a forked process has none of its parent's threads
os.register_at_fork(after_in_child=_pool.cache_clear)
