"""Synchronisation of a node's ranks by counters of steps in shared memory."""

import os
import select
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from shardlab.codecs.kernels.shared_counters import BYTES, SharedCounters
from shardlab.core.process import is_stopped

# events that ranks publish for a unit, with a number that only grows
UPDATED = "updated"
"""this rank's chunk of the unit has been updated so many times"""
OFFLOADED = "offloaded"
"""the gradients of so many backward passes may be read by other ranks"""
REDUCED = "reduced"
"""this rank has added up the gradients of so many backward passes; their buffer is free for it"""
GATHER = "gather"
"""this rank gathers the unit next, as its gather or end number so many"""
BACKWARD_END = "backward_end"
"""this rank ends a backward pass next, as its gather or end number so many"""
SEQUENCE = "sequence"
"""how many gathers and ends of backward passes this rank has begun"""
EVENTS = (UPDATED, OFFLOADED, REDUCED, GATHER, BACKWARD_END, SEQUENCE)

_POLL_S = 0.02
"""between two looks at whether the other ranks live"""
_LEFT, _FAILED, _FLAGS = 0, 1, 2
"""counters of a rank: whether it left in order, the bytes of its error, how many of these"""
_LINE = 64
"""bytes of a cache line: counters of two ranks share none"""
_TEXT = 1024
"""bytes for the error of a rank: its time, then its message"""
_TIME = struct.Struct("=d")


def progress_bytes(world_size: int, units: int) -> int:
    """Return the size of the memory of a `RankProgress`; it must be zero at first."""
    return world_size * (_stride(units) * BYTES + _TEXT)


def _stride(units: int) -> int:
    """Return the number of counters of a rank, padded to whole cache lines."""
    return -(-(_FLAGS + len(EVENTS) * units) * BYTES // _LINE) * _LINE // BYTES


class RankProgress:
    """Monotonic counters, one per rank, event and unit, and the first error of any rank.

    A rank publishes a number and others wait for it: what the publishing thread wrote before is
    then visible to the waiting one. Any thread may call.

    No wait outlasts the timeout, and all waits end soon after a rank of the node has died, was
    killed or called `fail`. Every rank raises the first reported error.

    Ranks count from 0 within the node's group; errors name them as the whole run does.

    Args:
        memory: `progress_bytes` from `offset` on, the same in all ranks.
        rank: of this process.
        pids: process ids of the ranks, all of them alive.
        names: the ranks' numbers in the run.
        units: for which each event is counted.
    """

    def __init__(
        self,
        memory: Any,
        offset: int,
        rank: int,
        pids: Sequence[int],
        names: Sequence[int],
        units: int,
        timeout_s: float,
    ) -> None:
        self._rank, self._pids, self._names = rank, pids, names
        self._units, self._timeout_s = units, timeout_s
        self._stride = _stride(units)
        self._counters = SharedCounters(memory, offset, len(pids) * self._stride)
        texts = offset + len(pids) * self._stride * BYTES
        self._texts = memoryview(memory)[texts : texts + len(pids) * _TEXT]
        self._reporting = threading.Lock()  # threads of one rank share its text
        # the kernel may reuse a process id, but a descriptor stays with its process
        self._pidfds = {os.pidfd_open(pid): r for r, pid in enumerate(pids) if r != rank}

    def publish(self, event: str, unit: int, step: int) -> None:
        """Publish that this rank has reached `step`, below 2^31, of an event of a unit."""
        counter = self._counter(self._rank, event, unit)
        assert step >= self._counters.read(counter), "counters only grow"
        self._counters.publish(counter, step)

    def wait(self, event: str, unit: int, step: int, ranks: Sequence[int] | None = None) -> None:
        """Return when each of the ranks, by default all, has published `step` or a later one.

        Raises:
            RuntimeError: a rank of the node is gone or failed, or one of these ranks is silent.
        """
        deadline = time.monotonic() + self._timeout_s
        awaited = range(len(self._pids)) if ranks is None else ranks
        for rank in awaited:
            counter = self._counter(rank, event, unit)
            while not self._counters.wait(counter, step, _POLL_S):
                self.check()
                self._check_awaited(awaited, event, unit, step, time.monotonic() > deadline)

    def behind(self, event: str, unit: int, step: int) -> str:
        """Return the names of ranks that have not published `step` or a later one yet, if any."""
        return self._names_of(self._late(range(len(self._pids)), event, unit, step))

    def check(self) -> None:
        """Raise what a wait would raise now because of ranks that are gone or failed."""
        gone = self._gone()
        # after the look at processes: an error that a rank reported before its end is the cause
        error = self._first_error()
        if error is not None:
            raise RuntimeError(error)
        if gone:
            self._abort(f"{self._names_of(gone)} gone: killed, or ended with an error of its own")

    def fail(self, message: str) -> None:
        """Report to all ranks, in one line, why this one cannot go on; the first report stays."""
        line = message.splitlines()[0] if message else "failed"
        self._report(f"{self._names_of([self._rank])}: {line}")

    def close(self) -> None:
        """Leave in order: the others go on with what this rank has published.

        No thread of this rank may wait any more. A rank that ends without this counts as killed.
        """
        self._counters.publish(self._rank * self._stride + _LEFT, 1)
        for pidfd in self._pidfds:
            os.close(pidfd)
        self._pidfds.clear()
        # views of the mapping, which cannot be unmapped while they exist
        self._texts.release()
        del self._counters

    def _counter(self, rank: int, event: str, unit: int) -> int:
        assert 0 <= unit < self._units, f"unit {unit} of {self._units}"
        return rank * self._stride + _FLAGS + EVENTS.index(event) * self._units + unit

    def _names_of(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {self._names[rank]}" for rank in ranks)

    def _left(self, rank: int) -> bool:
        return self._counters.read(rank * self._stride + _LEFT) == 1

    def _gone(self) -> list[int]:
        """Return the ranks whose processes have ended, but not in order."""
        poll = select.poll()
        for pidfd in self._pidfds:
            poll.register(pidfd, select.POLLIN)
        ended = [self._pidfds[pidfd] for pidfd, _ in poll.poll(0)]
        return sorted(rank for rank in ended if not self._left(rank))

    def _late(self, ranks: Iterable[int], event: str, unit: int, step: int) -> list[int]:
        reached = {rank: self._counters.read(self._counter(rank, event, unit)) for rank in ranks}
        return [rank for rank, published in reached.items() if published < step]

    def _check_awaited(
        self, ranks: Sequence[int], event: str, unit: int, step: int, timed_out: bool
    ) -> None:
        left = {rank for rank in ranks if self._left(rank)}
        # after the look at who left: a rank that has left publishes nothing more
        late = self._late(ranks, event, unit, step)
        goal = f"{event!r} of unit {unit} in step {step}"
        if left.intersection(late):
            self._abort(f"{self._names_of(sorted(left.intersection(late)))} left before {goal}")
        if late and timed_out:
            stopped = [rank for rank, pid in enumerate(self._pids) if is_stopped(pid)]
            why = " (stopped by a signal)" if stopped else ""
            # the launcher recognises gloo's wording: the cause is another rank
            waited = f"Timed out waiting {self._timeout_s:g} s for {goal}"
            self._abort(f"{self._names_of(stopped or late)} silent{why}: {waited}")

    def _abort(self, error: str) -> NoReturn:
        """Raise this error, or the one that some rank reported before."""
        self._report(error)
        raise RuntimeError(self._first_error())

    def _report(self, error: str) -> None:
        counter = self._rank * self._stride + _FAILED
        with self._reporting:
            if self._counters.read(counter) == 0:
                text = error.encode()[: _TEXT - _TIME.size]
                start = self._rank * _TEXT
                # the monotonic clock is the same in all processes of a machine
                _TIME.pack_into(self._texts, start, time.monotonic())
                self._texts[start + _TIME.size :][: len(text)] = text
                # last: who reads the size finds the text
                self._counters.publish(counter, len(text))

    def _first_error(self) -> str | None:
        """Return the earliest report of any rank."""
        reports: list[tuple[float, str]] = []
        for rank in range(len(self._pids)):
            if size := self._counters.read(rank * self._stride + _FAILED):
                text = self._texts[rank * _TEXT :][: _TIME.size + size]
                (when,) = _TIME.unpack_from(text)
                reports.append((when, bytes(text[_TIME.size :]).decode(errors="ignore")))
        return min(reports)[1] if reports else None
