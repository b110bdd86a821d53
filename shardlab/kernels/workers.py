"""Thread pools of the kernels: csrc/workers.h.

The threads do not use OpenMP and are not threads of torch.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from itertools import cycle, islice

import torch

from shardlab.kernels import native

_ANYWHERE = -1
_WORTH_A_THREAD = 1 << 16
"""Smallest number of elements for a thread; for fewer it costs more than it saves."""


class Workers:
    """Thread pool for kernels, whose threads may each be pinned to one processor.

    Any thread may submit a kernel; one kernel runs at a time. The caller waits without the
    interpreter lock. A forked process does not have the threads of its parent, and starts new ones
    at its first kernel. Without compiled kernels no threads are started, and the reference runs on
    the thread of the caller.

    Args:
        threads: Number of threads, at least 1.
        cpus: Processors of the threads, round-robin. By default threads are not pinned, since other
            processes may have pools, and inherit the affinity of the thread that starts them.

    Raises:
        ValueError: There are fewer than 1 thread, or a processor is outside the affinity mask.
    """

    def __init__(self, threads: int, cpus: Sequence[int] | None = None) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        self.threads = threads
        self.cpus = None if cpus is None else list(cpus)
        if threads < 1:
            raise ValueError(f"workers: needs at least 1 thread, not {threads}")
        if self.cpus is not None and not (self.cpus and set(allowed).issuperset(self.cpus)):
            raise ValueError(f"workers: may run on the processors {allowed}, not on {self.cpus}")
        self._end: weakref.finalize[..., Workers] | None = None
        self._handle = 0
        _ALL.add(self)

    def handle(self) -> int:
        """Return the address of the pool, which the first call starts; 0 without kernels."""
        with _starting:
            kernels = native.library()
            if not self._handle and kernels is not None:
                cpus = islice(cycle(self.cpus or [_ANYWHERE]), self.threads)
                pool, numbers = ctypes.c_void_p(), (ctypes.c_int64 * self.threads)(*cpus)
                kernels.workers_create(numbers, ctypes.c_int64(self.threads), ctypes.byref(pool))
                if pool.value is None:
                    raise RuntimeError(
                        f"workers: the system could not start {self.threads} threads"
                    )
                self._handle = pool.value
                self._end = weakref.finalize(self, kernels.workers_destroy, pool)
                # not at exit: a daemon thread may still be running a kernel then
                self._end.atexit = False
        return self._handle

    def close(self) -> None:
        """End the threads; no other thread may use them. The next kernel starts them again."""
        if self._end is not None:
            self._handle = 0
            self._end()

    def forget(self) -> None:
        """Drop the threads of the parent process, which its forked children lack."""
        if self._end is not None:
            self._handle = 0
            self._end.detach()


_ALL: "weakref.WeakSet[Workers]" = weakref.WeakSet()
_starting = threading.Lock()


def _forget_all() -> None:
    global _starting
    _starting = threading.Lock()
    for workers in _ALL:
        workers.forget()


os.register_at_fork(after_in_child=_forget_all)


def threads_for(n: int) -> int:
    """Return a pool with as many threads as torch uses, or 0 if n elements are too few for it."""
    threads = torch.get_num_threads()
    if threads < 2 or n < 2 * _WORTH_A_THREAD:
        return 0
    return _pool(threads).handle()


_pool = cache(Workers)
