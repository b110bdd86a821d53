"""The first command of several: the others keep a connection to it, from the start to the end.

A command that is killed closes its own, so that all know at once, whatever their ranks do.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.launch.failure import Failure, first, lost
from shardlab.launch.messages import connection_over, facts, interface_of, receive, send
from shardlab.launch.peers import Peers, Verdict
from shardlab.launch.place import Place

_BACKLOG = 1024
_HELLO_S = 5.0
_END_RANKS_S = 15.0
"""longest time that a command takes to end its ranks and say so"""


@dataclass
class _Member:
    name: str
    connection: Connection
    at_work: bool = True
    """has not said how the attempt ended there"""
    failure: Failure | None = None
    gone: bool = False

    def read(self) -> bool:
        """Whether it has failed."""
        self.at_work = False
        said = receive(self.connection)
        if said is None or "failure" not in said:
            self.lose()
        elif said["failure"] is not None:
            self.failure = Failure(**said["failure"])
        return self.failure is not None

    def lose(self) -> None:
        self.at_work = False
        self.gone = True
        self.failure = lost(self.name)


class Leader(Peers):
    """Gathers the other commands, keeps the store, decides what an attempt came to.

    The store's server is this process, not rank 0's: whoever fails can say so to the last.

    Raises:
        UserError: a command did not come, or was started for another run; or the port is in use.
    """

    def __init__(self, place: Place, world_size: int, timeout_s: float, restarts: int) -> None:
        self._place = place
        self._restarts = restarts
        self._facts = facts(place, world_size, restarts)
        self._members: list[_Member] = []
        self._door: socket.socket | None = None
        self._server: dist.TCPStore | None = None
        self._gather(timeout_s)

    @property
    def connections(self) -> dict[Connection, Callable[[], bool]]:  # noqa: D102
        return {member.connection: member.read for member in self._members if member.at_work}

    def begin(self) -> None:  # noqa: D102
        # ranks may knock before the server runs: the kernel keeps them waiting
        self._door = socket.create_server(("", 0), backlog=_BACKLOG)
        for member in self._members:
            member.at_work, member.failure = True, None
            send(member.connection, port=self._port)

    def serve(self) -> None:  # noqa: D102
        assert self._door is not None, "serve follows begin"
        address = "127.0.0.1", self._port
        self._server = dist.TCPStore(
            *address,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=self._door.detach(),
        )

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        address = "127.0.0.1", self._port
        self.close()
        return dist.TCPStore(*address, is_master=False, timeout=timeout)

    def settle(self, failure: Failure | None) -> Verdict:  # noqa: D102
        while (at_work := self.connections) and not self._foremost(failure):
            ready = wait(list(at_work))
            for connection, read in at_work.items():
                if connection in ready:
                    read()
        for connection in self.connections:
            send(connection, stop=True)
        while at_work := self.connections:
            ready = wait(list(at_work), timeout=_END_RANKS_S)
            for member in self._members:
                if member.connection in ready:
                    member.read()
                elif member.at_work and not ready:
                    member.lose()
        self._server = None  # ends its thread
        restarts = 0 if any(member.gone for member in self._members) else self._restarts
        verdict = Verdict.on(self._foremost(failure), restarts)
        self._restarts -= 1
        for member in self._members:
            final = verdict.failure and asdict(verdict.failure)
            send(member.connection, verdict=final, again=verdict.again)
        return verdict

    def close(self) -> None:  # noqa: D102
        self._server = None
        if self._door is not None:
            self._door.close()
        for member in self._members:
            member.connection.close()

    @property
    def _port(self) -> int:
        """Of the store."""
        assert self._door is not None, "begin opens it"
        return self._door.getsockname()[1]

    def _foremost(self, here: Failure | None) -> Failure | None:
        return first([here, *(member.failure for member in self._members)])

    def _gather(self, timeout_s: float) -> None:
        """Lets the others in, each once."""
        _, port = self._place.master or ("", 0)
        deadline = time.monotonic() + timeout_s
        missing = list(range(1, self._place.commands))
        try:
            with _listen(port) as door:
                while missing:
                    door.settimeout(max(0.01, deadline - time.monotonic()))
                    self._admit(door.accept()[0], missing)
        except TimeoutError:
            numbers = ", ".join(map(str, missing))
            self._refuse(
                f"{self._name(numbers)} did not come within {timeout_s:g} s: start it, too"
            )

    def _admit(self, visitor: socket.socket, missing: list[int]) -> None:
        interface = interface_of(visitor)
        connection = connection_over(visitor)
        hello = receive(connection, _HELLO_S) or {}
        number = hello.pop("command", None)
        if hello.keys() != self._facts.keys():
            connection.close()  # somebody who looks for open ports
        elif hello != self._facts:
            self._members.append(_Member(self._name(number), connection))
            key = next(key for key in hello if hello[key] != self._facts[key])
            self._refuse(
                f"{key} is {hello[key]} on {self._name(number)} and {self._facts[key]} on "
                f"{self._name(0)}: make them equal"
            )
        elif number not in missing:
            why = f"{self._name(number)} is there already: give each node its own --node-rank"
            send(connection, refused=why)
            connection.close()
        else:
            missing.remove(number)
            self._members.append(_Member(self._name(number), connection))
            if self.interface in (None, "lo"):  # commands of this machine may come that way
                self.interface = interface

    def _name(self, number: object) -> str:
        return f"{self._place.called} {number}"

    def _refuse(self, why: str) -> None:
        for member in self._members:
            send(member.connection, refused=why)
        self.close()
        raise UserError(why)


def _listen(port: int) -> socket.socket:
    try:
        return socket.create_server(("", port), backlog=_BACKLOG)
    except OSError as error:
        why = os.strerror(error.errno or 0).lower()
        raise UserError(
            f"cannot await the others at port {port} ({why}): choose another in --master"
        ) from None
