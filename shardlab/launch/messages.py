"""Values between commands of several machines: framed JSON over TCP."""

import fcntl
import json
import socket
import struct
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from shardlab.launch.place import Place

_LONGEST = 1 << 20
_SIOCGIFADDR = 0x8915


def connection_over(made: socket.socket) -> Connection:
    """Takes over a socket; it breaks within half a minute when the other machine vanishes."""
    made.setblocking(True)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    # of who begins a message and does not end it
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
    return Connection(made.detach())


def facts(place: Place, world_size: int, restarts: int) -> dict[str, int]:
    """What all commands of a run have to agree on."""
    return {"nnodes": place.commands, "train.world_size": world_size, "max_restarts": restarts}


def send(connection: Connection, **values: Any) -> None:
    """To one who may be gone: whoever reads from the connection next will notice."""
    with suppress(OSError):
        connection.send_bytes(json.dumps(values).encode())


def receive(connection: Connection, timeout_s: float | None = None) -> dict[str, Any] | None:
    """The next values; None when the other is gone, is silent or speaks otherwise."""
    try:
        if not connection.poll(timeout_s):
            return None
        values = json.loads(connection.recv_bytes(_LONGEST))
    except (EOFError, OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def interface_of(made: socket.socket) -> str | None:
    """The network interface that has the socket's own address (IPv4)."""
    address = made.getsockname()[0]
    if address.startswith("127."):
        return "lo"
    for _, name in socket.if_nameindex():
        request = struct.pack("256s", name.encode())
        try:
            answer = fcntl.ioctl(made.fileno(), _SIOCGIFADDR, request)
        except OSError:  # it has no address
            continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None
