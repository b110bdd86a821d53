"""A pool of threads for the kernels that are given one: csrc/workers.h.

The threads belong to the object: they use no OpenMP and share nothing with torch's own.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Sequence

from shardlab.kernels import native
from shardlab.kernels.native import INT, POINTER, function

_c_create = function("workers_create", POINTER, INT, POINTER)
_c_destroy = function("workers_destroy", POINTER)

_ANYWHERE = -1


class Workers:
    """Threads that wait for kernels, each pinned to one processor if these are told.

    Any thread may hand work to them; one kernel runs at a time, the others wait. The caller only
    waits, without the interpreter lock. A forked process has none of its parent's threads: it
    starts its own when it first needs them. Where no compiled kernels are, no threads are started
    and the reference runs on the caller's.

    Args:
        threads: at least 1.
        cpus: the processors of the threads, in turn. By default they are not pinned, since other
            processes may have a pool as well: they may run where the caller may that starts them.

    Raises:
        ValueError: no thread, or a processor that the caller may not run on.
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
        self._handle: int | None = None
        _ALL.add(self)

    def handle(self) -> int | None:
        """The pool of the C ABI, whose threads the first call starts; None without kernels."""
        with _starting:
            if self._handle is None and native.library() is not None:
                turns = self.cpus or [_ANYWHERE]
                cpus = [turns[i % len(turns)] for i in range(self.threads)]
                pool = ctypes.c_void_p()
                _c_create((ctypes.c_int64 * len(cpus))(*cpus), len(cpus), ctypes.addressof(pool))
                if pool.value is None:
                    raise RuntimeError(f"workers: the system starts no {self.threads} threads")
                self._handle = pool.value
                self._end = weakref.finalize(self, _c_destroy, pool.value)
                # the end of the process ends them too, even beside a kernel of a daemon thread
                self._end.atexit = False
        return self._handle

    def close(self) -> None:
        """Ends the threads. No other thread may be using them; the next use starts them again."""
        if self._end is not None:
            self._handle = None
            self._end()

    def _forget(self) -> None:
        if self._end is not None:
            self._handle = None
            self._end.detach()


_ALL: "weakref.WeakSet[Workers]" = weakref.WeakSet()
_starting = threading.Lock()


def _forget_all() -> None:
    global _starting
    _starting = threading.Lock()
    for workers in _ALL:
        workers._forget()


os.register_at_fork(after_in_child=_forget_all)
