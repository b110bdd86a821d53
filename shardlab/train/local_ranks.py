"""Processes of one machine: forked, watched and killed together."""

import json
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Self

from shardlab.core.process import is_stopped
from shardlab.train.rank_failure import TIMEOUTS_S, UNKNOWN_ORDER, Failure, first

_REPORTS_S = 0.2
"""a rank that is killed breaks the connections of others within milliseconds"""
_POLL_S = 1.0


class Limit:
    """Longest duration of a run, from now on; None: no limit."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds = math.inf if seconds is None else seconds
        self._deadline = time.monotonic() + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds until the limit."""
        return max(0.0, self._deadline - time.monotonic())


@dataclass
class _Process:
    name: str
    process: ForkProcess
    pipe: Connection
    attempt: str = ""
    reported: Failure | None = None

    def read(self) -> bool:
        """Read one message; return False when the process has ended."""
        try:
            message = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):  # no error: the pipe closes with the process
            self.process.join()
            return False
        if "attempt" in message and len(message) == 1:
            self.attempt = message["attempt"]
        else:
            self.reported = Failure(**message)
        return True

    def failure(self) -> Failure | None:
        """Return what the rank has reported, or how its process ended; None when it has not."""
        code = self.process.exitcode
        if code is None or code == 0:
            return self.reported
        if code > 0:
            text = f"{self.name} ended with exit code {code}"
            return self.reported or Failure("crash", text, attempt=self.attempt)
        killed = -code == signal.SIGKILL
        hint = ", out of memory?" if killed else ""
        text = f"{self.name} was killed by signal {-code} ({signal.Signals(-code).name}{hint})"
        return Failure("memory" if killed else "crash", text, attempt=self.attempt)

    @property
    def stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process."""
        assert self.process.pid is not None, "it was started"
        return is_stopped(self.process.pid)


class Processes:
    """Context of forked processes; none is left after it.

    Args:
        works: what each calls, by the names that failures have. It may send a `Failure` as JSON.
    """

    def __init__(self, works: Mapping[str, Callable[[Connection], None]]) -> None:
        self._works = works
        self._all: list[_Process] = []

    def __enter__(self) -> Self:
        fork = multiprocessing.get_context("fork")
        try:
            for name, work in self._works.items():
                ours, theirs = fork.Pipe(duplex=False)
                process = fork.Process(target=work, args=(theirs,), name=name)
                process.start()
                theirs.close()  # the process alone holds this end: the pipe closes when it ends
                self._all.append(_Process(name, process, ours))
        except BaseException:  # a fork failed, or an interrupt: `with` calls no __exit__ then
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._all:
            rank.process.kill()
        for rank in self._all:
            rank.process.join()
            rank.pipe.close()

    def watch(self, limit: Limit, failed_elsewhere: Callable[[str], bool]) -> Failure | None:
        """Return None when all ranks are done, or the first failure.

        Args:
            limit: of the duration; a run that exceeds it has failed.
            failed_elsewhere: whether a rank of another process has failed, given the name of the
                attempt; the ranks here may not notice, as long as they do not communicate.
        """
        running = {rank.pipe: rank for rank in self._all}
        while running:
            ready = wait(list(running), timeout=min(limit.left_s, _POLL_S))
            if not ready and limit.left_s == 0:
                return Failure("timeout", f"not done after {limit.seconds:g} s")
            if not ready and failed_elsewhere(self._all[0].attempt):
                return self._first_failure(running) or Failure(
                    "crash",
                    f"{self._all[0].name}: another rank has failed",
                    order=UNKNOWN_ORDER,
                    attempt=self._all[0].attempt,
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = running[pipe]
                if not rank.read():
                    del running[pipe]
                if rank.failure() is not None:
                    return self._first_failure(running)
        return None

    def _first_failure(self, running: dict[Connection, _Process]) -> Failure | None:
        """Return the first failure, after waiting for the ranks that fail at the same time."""
        self._read(running, _REPORTS_S)
        failure = self._earliest()
        if failure is not None and failure.waited:
            if any(not rank.stopped for rank in running.values()):
                self._read(running, TIMEOUTS_S)
            failure = self._earliest()
        return _silence([*running.values()], failure) or failure

    def _read(self, running: dict[Connection, _Process], seconds: float) -> None:
        """Read reports for that long, or until all ranks have ended."""
        deadline = time.monotonic() + seconds
        while running and (ready := wait(list(running), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if not running[pipe].read():
                    del running[pipe]

    def _earliest(self) -> Failure | None:
        return first(rank.failure() for rank in self._all)


def _silence(ranks: Sequence[_Process], failure: Failure | None) -> Failure | None:
    """Blame the ranks that are stopped, or that run on without a report while others timed out."""
    if failure is not None and not failure.waited:
        return None
    stopped = [rank for rank in ranks if rank.stopped]
    if not stopped and (failure is None or not ranks):
        return None
    names = ", ".join(rank.name for rank in stopped or ranks)
    why = "stopped by a signal" if stopped else "neither at an end nor in touch"
    suffix = "" if failure is None else f": {failure.summary}"
    return Failure("crash", f"{names}: {why}{suffix}", attempt=ranks[0].attempt)
