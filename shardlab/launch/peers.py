"""What a command has to do with the others of its run: the contract, and the command alone."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import torch.distributed as dist

from shardlab.launch.failure import Failure


class Verdict(NamedTuple):
    """What came of an attempt, the same for all commands."""

    failure: Failure | None
    again: bool = False
    """another attempt follows"""

    @classmethod
    def on(cls, failure: Failure | None, restarts: int) -> Self:
        """Of who may begin again `restarts` times."""
        return cls(failure, failure is not None and failure.may_pass and restarts > 0)


class Peers(ABC):
    """The commands of one run, as one of them sees them.

    An attempt goes: `begin`, fork the ranks, `serve`, watch `connections` as well as the ranks, end
    the ranks, `settle`. No thread of ours runs while ranks are forked.

    Raises:
        UserError: (from `begin`) a command is missing, or was started for another run.
    """

    interface: str | None = None
    """network interface for gloo; None: as gloo or the user chooses"""

    @property
    def connections(self) -> Mapping[Connection, Callable[[], bool]]:
        """What `multiprocessing.connection.wait` is to watch during an attempt.

        Whoever finds one ready calls its function: it reads what came, and returns whether the
        ranks have to stop.
        """
        return {}

    @abstractmethod
    def begin(self) -> None:
        """Waits for the other commands, and prepares the store of the attempt."""

    @abstractmethod
    def serve(self) -> None:
        """Lets the ranks, which are forked by now, into the store."""

    @abstractmethod
    def connect(self, timeout: timedelta) -> dist.Store:
        """The store of the attempt; called in the process of each rank, once."""

    @abstractmethod
    def settle(self, failure: Failure | None) -> Verdict:
        """Tells the others how the attempt ended here; returns when all know how it ended."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the others; an attempt under way fails for them."""


class Alone(Peers):
    """One command for all ranks.

    Their store is a file without a name, which lives as long as a process has it open.

    Args:
        restarts: how many attempts may follow the first.
    """

    def __init__(self, restarts: int) -> None:
        self.interface = "lo"  # a host name may not resolve
        self._restarts = restarts
        self._file: int | None = None

    def begin(self) -> None:  # noqa: D102
        self._file = os.memfd_create("ranks")

    def serve(self) -> None:
        """Nothing is to be done: the ranks have inherited the file."""

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        store = dist.FileStore(f"/proc/self/fd/{self._file}")
        store.set_timeout(timeout)
        return store

    def settle(self, failure: Failure | None) -> Verdict:  # noqa: D102
        self.close()
        verdict = Verdict.on(failure, self._restarts)
        self._restarts -= 1
        return verdict

    def close(self) -> None:  # noqa: D102
        if self._file is not None:
            os.close(self._file)
            self._file = None
