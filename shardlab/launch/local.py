"""The ranks that this command started: forked, watched, ended."""

import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Self

from shardlab.core.process import is_stopped
from shardlab.launch.failure import Failure, first
from shardlab.launch.peers import Peers

_LAST_WORDS_S = 0.2
"""a rank that is killed takes others along within milliseconds"""
_SILENCE_S = 5.0
"""ranks that wait for the same one give up one after the other, as they began to wait"""


@dataclass
class _Rank:
    name: str
    process: ForkProcess
    pipe: Connection
    meeting: str = ""
    said: Failure | None = None

    def listen(self) -> bool:
        """Reads one message, or that the process has ended: then False."""
        try:
            message = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            return False
        if "meeting" in message and len(message) == 1:
            self.meeting = message["meeting"]
        else:
            self.said = Failure(**message)
        return True

    def failure(self) -> Failure | None:
        """What the rank has said, or how it has ended, as far as it has."""
        code = self.process.exitcode
        if code is None or code == 0:
            return self.said
        if code > 0:
            told = f"{self.name} ended with exit code {code}"
            return self.said or Failure("crash", told, meeting=self.meeting)
        killed = -code == signal.SIGKILL
        hint = ", out of memory?" if killed else ""
        told = f"{self.name} was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
        return Failure("memory" if killed else "crash", told, meeting=self.meeting)

    @property
    def stopped(self) -> bool:
        """Whether a signal holds it up, such as SIGSTOP."""
        assert self.process.pid is not None, "it was started"
        return is_stopped(self.process.pid)


class LocalRanks:
    """Processes of `work(number, pipe)`, from `with` on; none is left after it."""

    def __init__(self, numbers: Iterable[int], work: Callable[[int, Connection], None]) -> None:
        self._numbers = numbers
        self._work = work
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Self:
        fork = multiprocessing.get_context("fork")
        try:
            for number in self._numbers:
                ours, theirs = fork.Pipe(duplex=False)
                name = f"rank {number}"
                process = fork.Process(target=self._work, args=(number, theirs), name=name)
                process.start()
                theirs.close()  # the rank's end alone stays open, and closes when it ends
                self._ranks.append(_Rank(name, process, ours))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.pipe.close()

    def watch(self, peers: Peers, deadline: float | None) -> Failure | None:
        """Returns None when all ranks are done, or what was the first failure here.

        When the other commands say stop, either may be.

        Raises:
            TimeoutError: `deadline` of `time.monotonic` is over.
        """
        running = {rank.pipe: rank for rank in self._ranks}
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            others = peers.connections
            ready = wait([*running, *others], timeout=left)
            if not ready:
                raise TimeoutError
            for connection in ready:
                assert isinstance(connection, Connection)
                if connection in running:
                    rank = running[connection]
                    if not rank.listen():
                        del running[connection]
                    stop = rank.failure() is not None
                else:
                    stop = others[connection]()
                if stop:
                    return self._first_failure(running)
        return None

    def _first_failure(self, running: dict[Connection, _Rank]) -> Failure | None:
        """Of the ranks that have failed, those that do so now included."""
        self._listen(running, _LAST_WORDS_S)
        failure = self._foremost()
        if failure is not None and failure.waited:
            if any(not rank.stopped for rank in running.values()):
                self._listen(running, _SILENCE_S)
            failure = self._foremost()
        return _silence([*running.values()], failure) or failure

    def _listen(self, running: dict[Connection, _Rank], seconds: float) -> None:
        """Lets ranks say something that long, or until all of them have ended."""
        deadline = time.monotonic() + seconds
        while running and (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if not running[pipe].listen():
                    del running[pipe]

    def _foremost(self) -> Failure | None:
        return first(rank.failure() for rank in self._ranks)


def _silence(ranks: Sequence[_Rank], failure: Failure | None) -> Failure | None:
    """What those are to blame for that neither go on nor say why, where others gave up waiting."""
    if failure is not None and not failure.waited:
        return None
    stopped = [rank for rank in ranks if rank.stopped]
    if not stopped and (failure is None or not ranks):
        return None
    names = ", ".join(rank.name for rank in stopped or ranks)
    why = "stopped by a signal" if stopped else "neither at an end nor in touch"
    told = "" if failure is None else f": {failure.summary}"
    return Failure("crash", f"{names}: {why}{told}", meeting=ranks[0].meeting)
