"""Counters in shared memory, by which processes wait for each other without a message.

A counter is an aligned 32-bit integer, zero at first, that one process sets and any number of
processes await. Publishing is a release and waiting an acquire: a process that has read a value of
a counter sees all that the publishing thread wrote before. Waiting processes sleep in the kernel
(futex(2)) and are woken by the publication; the interpreter lock is released meanwhile.

The reference polls with short sleeps, and relies on a processor that keeps the order of stores, as
x86 does.
"""

import ctypes
import time
from typing import Any

from shardlab.codecs import native
from shardlab.codecs.native import INT, POINTER, function

BYTES = 4
"""of a counter"""
_POLL_S = 50e-6

_c_publish = function("words_publish", POINTER, INT)
_c_wait = function("words_wait", POINTER, INT, INT, POINTER)


class SharedCounters:
    """Array of counters; thread-safe.

    Args:
        memory: writable, such as a mapping that processes share; kept alive.
        offset: of the first counter in it, in bytes, a multiple of 4.
    """

    def __init__(self, memory: Any, offset: int, count: int) -> None:
        self._values = (ctypes.c_int32 * count).from_buffer(memory, offset)
        self._address = ctypes.addressof(self._values)
        assert self._address % BYTES == 0, "futexes are aligned"

    def publish(self, index: int, value: int) -> None:
        """Set a counter, to less than 2^31, and wake the processes that wait for it."""
        if native.library() is None:
            self._values[index] = value
        else:
            _c_publish(self._address + index * BYTES, value)

    def read(self, index: int) -> int:
        """Return the present value."""
        return self._await(index, 0, 0.0)

    def wait(self, index: int, value: int, timeout_s: float) -> bool:
        """Wait until the counter is `value` or more; return False after the timeout."""
        return self._await(index, value, timeout_s) >= value

    def _await(self, index: int, value: int, timeout_s: float) -> int:
        if native.library() is None:
            return self._poll(index, value, time.monotonic() + timeout_s)
        found = ctypes.c_int32()
        address = self._address + index * BYTES
        _c_wait(address, value, max(0, int(timeout_s * 1e9)), ctypes.byref(found))
        return found.value

    def _poll(self, index: int, value: int, deadline: float) -> int:
        while (found := int(self._values[index])) < value and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found
