"""Thread pools of the kernels: csrc/workers.h.

Their threads use no OpenMP and are separate from those of torch.
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
"""elements; for fewer a thread costs more than it saves"""


class Workers:
    """Thread pool for kernels, whose threads may each be pinned to one processor.

    Any thread may submit a kernel; one runs at a time, the others wait. The caller only waits,
    without the interpreter lock. A forked process has none of its parent's threads: it starts its
    own when it first needs them. Without compiled kernels no threads are started, and the
    reference runs on the caller's.

    Args:
        threads: at least 1.
        cpus: processors of the threads, round-robin. By default they are not pinned, since other
            processes may have a pool as well, and inherit the affinity of the starting thread.

    Raises:
        ValueError: fewer threads than 1, or a processor outside the affinity of the caller.
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
        """Return the address of the pool, started by the first call; 0 without kernels."""
        with _starting:
            kernels = native.library()
            if not self._handle and kernels is not None:
                cpus = islice(cycle(self.cpus or [_ANYWHERE]), self.threads)
                pool, numbers = ctypes.c_void_p(), (ctypes.c_int64 * self.threads)(*cpus)
                kernels.workers_create(numbers, ctypes.c_int64(self.threads), ctypes.byref(pool))
                if pool.value is None:
                    raise RuntimeError(f"workers: the system starts no {self.threads} threads")
                self._handle = pool.value
                self._end = weakref.finalize(self, kernels.workers_destroy, pool)
                # not at exit: a daemon thread may still be running a kernel then
                self._end.atexit = False
        return self._handle

    def close(self) -> None:
        """End the threads, which no other thread may be using; the next use starts them again."""
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
    """Return a pool of as many threads as torch uses; 0 if n elements are too few for it."""
    threads = torch.get_num_threads()
    if threads < 2 or n < 2 * _WORTH_A_THREAD:
        return 0
    return _pool(threads).handle()


_pool = cache(Workers)
