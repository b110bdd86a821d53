"""How far the ranks of a node are, whether they live and what went wrong, in shared memory."""

import os
import select
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from shardlab.core.process import is_stopped
from shardlab.kernels.shared_counters import BYTES, SharedCounters

_SLICE_S = 0.02
"""how long a rank sleeps before it looks whether the others live"""
_LEFT, _FAILED, _FLAGS = 0, 1, 2
"""counters of a rank: whether it left in order, the bytes of its account, how many those are"""
_LINE = 64
"""bytes of a cache line: counters of two ranks share none"""
_TEXT = 1024
"""bytes for the account of a rank that failed: when, then what"""
_TIME = struct.Struct("=d")


def control_bytes(world_size: int, kinds: int, units: int) -> int:
    """What `Control` takes of the memory; zeros at first."""
    return world_size * (_stride(kinds, units) * BYTES + _TEXT)


def _stride(kinds: int, units: int) -> int:
    """Counters of a rank."""
    return -(-(_FLAGS + kinds * units) * BYTES // _LINE) * _LINE // BYTES


class Control:
    """A step counter for each rank, kind of event and unit; any thread may call.

    A rank publishes that it has done something for a unit in a step, and others wait for it: what
    the publishing thread wrote before is then seen by the waiting one. Counters only grow.

    No wait lasts longer than the timeout, and all of them end soon after a rank of the node has
    died, was killed or called `fail`. The first account of what went wrong is raised by every rank.

    Ranks are those of the node's group, from 0 on; errors name them as the whole run does.

    Args:
        memory: `control_bytes` from `offset` on, the same in all ranks.
        rank: of this process.
        pids: process ids of the ranks; their processes live.
        names: the ranks' numbers in the run.
        kinds: of events.
    """

    def __init__(
        self,
        memory: Any,
        offset: int,
        rank: int,
        pids: Sequence[int],
        names: Sequence[int],
        kinds: Sequence[str],
        units: int,
        timeout_s: float,
    ) -> None:
        self._rank, self._pids, self._names = rank, pids, names
        self._kinds = {kind: number for number, kind in enumerate(kinds)}
        self._units, self._timeout_s = units, timeout_s
        self._stride = _stride(len(kinds), units)
        self._words = SharedCounters(memory, offset, len(pids) * self._stride)
        texts = offset + len(pids) * self._stride * BYTES
        self._texts = memoryview(memory)[texts : texts + len(pids) * _TEXT]
        self._failing = threading.Lock()
        # a number may be given to another process later, a file descriptor stays with this one
        self._lives = {os.pidfd_open(pid): r for r, pid in enumerate(pids) if r != rank}

    def publish(self, kind: str, unit: int, step: int) -> None:
        """Says that this rank has done `kind` for the unit in this step, below 2^31."""
        word = self._word(self._rank, kind, unit)
        assert step >= self._words.read(word), "counters only grow"
        self._words.publish(word, step)

    def wait(self, kind: str, unit: int, step: int, ranks: Sequence[int] | None = None) -> None:
        """Returns when each of the ranks, by default all, has published `step` or a later one.

        Raises:
            RuntimeError: a rank of the node is gone or failed, or one of these ranks is silent.
        """
        deadline = time.monotonic() + self._timeout_s
        awaited = range(len(self._pids)) if ranks is None else ranks
        for rank in awaited:
            word = self._word(rank, kind, unit)
            while not self._words.wait(word, step, _SLICE_S):
                self.check()
                self._check_awaited(awaited, kind, unit, step, time.monotonic() > deadline)

    def behind(self, kind: str, unit: int, step: int) -> str:
        """The names of ranks that have not published `step` or a later one yet, if any."""
        return self._names_of(self._late(range(len(self._pids)), kind, unit, step))

    def check(self) -> None:
        """Raises what a wait would raise now because of ranks that are gone or failed."""
        gone = self._gone()
        # in this order: an account that a rank has left before its end is the cause
        account = self._account()
        if account is not None:
            raise RuntimeError(account)
        if gone:
            self._end(f"{self._names_of(gone)} gone: killed, or ended with an error of its own")

    def fail(self, message: str) -> None:
        """Tells the others, in one line, why this rank cannot go on; the first account stays."""
        line = message.splitlines()[0] if message else "failed"
        self._tell(f"{self._names_of([self._rank])}: {line}")

    def close(self) -> None:
        """Leaves in order: the others go on with what this rank has published.

        No thread of this rank waits any more. A rank that ends without this is taken for killed.
        """
        self._words.publish(self._rank * self._stride + _LEFT, 1)
        for life in self._lives:
            os.close(life)
        self._lives.clear()
        self._texts.release()
        del self._words

    def _word(self, rank: int, kind: str, unit: int) -> int:
        assert 0 <= unit < self._units, f"unit {unit} of {self._units}"
        return rank * self._stride + _FLAGS + self._kinds[kind] * self._units + unit

    def _names_of(self, ranks: Iterable[int]) -> str:
        return ", ".join(f"rank {self._names[rank]}" for rank in ranks)

    def _left(self, rank: int) -> bool:
        return self._words.read(rank * self._stride + _LEFT) == 1

    def _gone(self) -> list[int]:
        """Ranks whose processes have ended, but not in order."""
        poll = select.poll()
        for life in self._lives:
            poll.register(life, select.POLLIN)
        ended = [self._lives[life] for life, _ in poll.poll(0)]
        return sorted(rank for rank in ended if not self._left(rank))

    def _late(self, ranks: Iterable[int], kind: str, unit: int, step: int) -> list[int]:
        return [rank for rank in ranks if self._words.read(self._word(rank, kind, unit)) < step]

    def _check_awaited(
        self, ranks: Sequence[int], kind: str, unit: int, step: int, too_late: bool
    ) -> None:
        left = {rank for rank in ranks if self._left(rank)}
        # in this order: who has left has published its last
        late = self._late(ranks, kind, unit, step)
        goal = f"{kind!r} of unit {unit} in step {step}"
        if left.intersection(late):
            self._end(f"{self._names_of(sorted(left.intersection(late)))} left before {goal}")
        if late and too_late:
            stopped = [rank for rank, pid in enumerate(self._pids) if is_stopped(pid)]
            why = " (stopped by a signal)" if stopped else ""
            # the launcher knows by gloo's words that the cause is another rank
            told = f"Timed out waiting {self._timeout_s:g} s for {goal}"
            self._end(f"{self._names_of(stopped or late)} silent{why}: {told}")

    def _end(self, account: str) -> NoReturn:
        """Raises the account, or an earlier one."""
        self._tell(account)
        raise RuntimeError(self._account())

    def _tell(self, account: str) -> None:
        word = self._rank * self._stride + _FAILED
        with self._failing:
            if self._words.read(word) == 0:
                text = account.encode()[: _TEXT - _TIME.size]
                start = self._rank * _TEXT
                # the clock is the same in all processes of a machine
                _TIME.pack_into(self._texts, start, time.monotonic())
                self._texts[start + _TIME.size :][: len(text)] = text
                self._words.publish(word, len(text))

    def _account(self) -> str | None:
        """The first one, of whichever rank."""
        told: list[tuple[float, str]] = []
        for rank in range(len(self._pids)):
            if size := self._words.read(rank * self._stride + _FAILED):
                text = self._texts[rank * _TEXT :][: _TIME.size + size]
                (when,) = _TIME.unpack_from(text)
                told.append((when, bytes(text[_TIME.size :]).decode(errors="ignore")))
        return min(told)[1] if told else None
