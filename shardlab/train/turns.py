"""Turns of timings that share a machine: the ranks of one at a time do a repetition.

Each timing has ranks of its own, forked beforehand, which wait here without using the CPU. The next
turn is for the timing that has done the least of its repetitions, so that all of them last from the
beginning to the end: the drift of the machine is theirs alike.
"""

import math
import multiprocessing
from collections.abc import Sequence
from typing import Protocol

_ABSENT = -1.0


class Turn(Protocol):
    """Turns of one timing, on each of its ranks."""

    shown: bool
    """whether its progress is shown: one bar for all"""

    def wait(self, done: float) -> None:
        """End a turn and wait for the next; all ranks call it, after a barrier.

        Args:
            done: share of the repetitions that the timing has done.
        """

    def leave(self) -> None:
        """Have no more turns; all ranks call it, after a barrier."""


class Alone:
    """Turns of a timing that has the machine to itself."""

    shown = True

    def wait(self, done: float) -> None:
        """Go on."""

    def leave(self) -> None:
        """Go on."""


class Turns:
    """Turns of several timings, created before their ranks are forked.

    Whoever watches the ranks has to end all of them when one fails: the others would wait forever.

    Args:
        ranks: number of ranks of each timing.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        fork = multiprocessing.get_context("fork")
        self._ranks = ranks
        self._gates = [fork.Semaphore(0) for _ in ranks]
        self._done = fork.Array("d", [_ABSENT] * len(ranks))

    def of(self, timing: int, rank: int) -> Turn:
        """Return the turns of a timing, on one of its ranks."""
        return _Shared(self, timing, rank)

    def wait(self, timing: int) -> None:
        """Wait for the turn of a timing, on one of its ranks."""
        self._gates[timing].acquire()

    def pass_on(self, timing: int, done: float) -> None:
        """End the turn of a timing, or its wait for the first; begin the next turn.

        The first begins when all timings are there.
        """
        with self._done.get_lock():
            self._done[timing] = done
            shares = self._done[:]
            least = min(shares)
            if least != _ABSENT and least != math.inf:
                following = shares.index(least)
                for _ in range(self._ranks[following]):
                    self._gates[following].release()


class _Shared:
    def __init__(self, turns: Turns, timing: int, rank: int) -> None:
        self._turns, self._timing, self._rank = turns, timing, rank
        self.shown = timing == 0

    def wait(self, done: float) -> None:
        if self._rank == 0:
            self._turns.pass_on(self._timing, done)
        self._turns.wait(self._timing)

    def leave(self) -> None:
        if self._rank == 0:
            self._turns.pass_on(self._timing, math.inf)
