"""Every command of several but the first, to which it keeps a connection."""

import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import Connection

import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.launch.failure import Failure, lost
from shardlab.launch.messages import connection_over, facts, interface_of, receive, send
from shardlab.launch.peers import Peers, Verdict
from shardlab.launch.place import Place

_REFUSAL_S = 5.0
"""longest way of the leader's refusal"""


class Member(Peers):
    """Does what the first command decides.

    Raises:
        UserError: it cannot be reached.
    """

    def __init__(self, place: Place, world_size: int, timeout_s: float, restarts: int) -> None:
        assert place.master is not None, "the leader is alone without one"
        self._master, self._port = place.master, 0
        self._timeout_s = timeout_s
        self._first = f"{place.called} 0"
        self._gone = False
        made = _reach(place, timeout_s)
        self.interface = interface_of(made)
        self._leader = connection_over(made)
        send(self._leader, command=place.command, **facts(place, world_size, restarts))

    @property
    def connections(self) -> dict[Connection, Callable[[], bool]]:  # noqa: D102
        return {self._leader: self._heard}

    def begin(self) -> None:  # noqa: D102
        # the leader answers when all are there, or its own patience is at an end
        said = receive(self._leader, self._timeout_s + _REFUSAL_S) or {}
        if "port" not in said and self._port:
            raise lost(self._first).error()
        if "port" not in said:
            address = ":".join(map(str, self._master))
            silent = f"{self._first} at {address} has ended, or something else answers there"
            raise UserError(said.get("refused", silent))
        self._port = said["port"]

    def serve(self) -> None:
        """The leader does it."""

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        self.close()
        return dist.TCPStore(self._master[0], self._port, is_master=False, timeout=timeout)

    def _heard(self) -> bool:
        """The leader says stop, or is gone."""
        self._gone = receive(self._leader) is None
        return True

    def settle(self, failure: Failure | None) -> Verdict:  # noqa: D102
        send(self._leader, failure=failure and asdict(failure))
        while not self._gone:
            said = receive(self._leader)
            if said is None:
                self._gone = True
            elif "verdict" in said:
                verdict = said["verdict"] and Failure(**said["verdict"])
                return Verdict(verdict, said["again"])
        return Verdict(lost(self._first))

    def close(self) -> None:  # noqa: D102
        self._leader.close()


def _reach(place: Place, timeout_s: float) -> socket.socket:
    """Connects as soon as the leader is there."""
    assert place.master is not None, "only a command alone has none"
    host, port = place.master
    deadline = time.monotonic() + timeout_s
    while (left := deadline - time.monotonic()) > 0:
        try:
            return socket.create_connection((host, port), timeout=left)
        except socket.gaierror:
            raise UserError(f"--master: there is no host {host!r}") from None
        except OSError:
            time.sleep(min(0.2, left))
    raise UserError(
        f"no answer from {place.called} 0 at {host}:{port} within {timeout_s:g} s: "
        "start it, too, and give all the same --master"
    )
