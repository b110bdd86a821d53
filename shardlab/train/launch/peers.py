"""What a command has to do with the others of its run: the contract, and the command alone."""

import socket
from abc import ABC, abstractmethod
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch.distributed as dist

from shardlab.train.launch.failure import Failure


class Verdict(NamedTuple):
    """What came of an attempt, the same for all commands."""

    failure: Failure | None
    again: bool = False
    """another attempt follows"""


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
    def connections(self) -> list[Connection]:
        """What `multiprocessing.connection.wait` is to watch during an attempt."""
        return []

    @abstractmethod
    def begin(self) -> None:
        """Waits for the other commands, and prepares the store of the attempt."""

    @abstractmethod
    def serve(self) -> None:
        """Lets the ranks into the store."""

    @abstractmethod
    def connect(self, timeout: timedelta) -> dist.Store:
        """The store of the attempt; called in the process of each rank, once."""

    def heard(self, connection: Connection) -> bool:
        """Reads what came over a connection; whether the ranks have to stop."""
        raise NotImplementedError("there are no connections")

    @abstractmethod
    def settle(self, failure: Failure | None) -> Verdict:
        """Tells the others how the attempt ended here; returns when all know how it ended."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the others; an attempt under way fails for them."""


class Alone(Peers):
    """One command for all ranks.

    The store's server is this process: it outlives every rank, so that each can say when it failed.

    Args:
        restarts: how many attempts may follow the first.
        address: where the server listens.
    """

    def __init__(self, restarts: int, address: str = "127.0.0.1") -> None:
        self.interface = "lo"  # a host name may not resolve
        self._restarts = restarts
        self._address = address
        self._door: socket.socket | None = None
        self._server: dist.TCPStore | None = None
        self._port = 0

    def begin(self) -> None:  # noqa: D102
        # ranks may knock before the server runs: the kernel keeps them waiting
        self._door = socket.create_server((self._address, 0), backlog=1024)
        self._port = self._door.getsockname()[1]

    def serve(self) -> None:  # noqa: D102
        assert self._door is not None, "serve follows begin"
        self._server = dist.TCPStore(
            "127.0.0.1",
            self._port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._door.detach(),
        )

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        self.close()
        return dist.TCPStore("127.0.0.1", self._port, is_master=False, timeout=timeout)

    def settle(self, failure: Failure | None) -> Verdict:  # noqa: D102
        self._server = None  # ends its thread
        again = failure is not None and failure.may_pass and self._restarts > 0
        self._restarts -= again
        return Verdict(failure, again)

    def close(self) -> None:  # noqa: D102
        self._server = None
        if self._door is not None:
            self._door.close()
