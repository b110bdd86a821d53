"""Emulated network links between the ranks of one machine (Linux).

Every rank sits in a network namespace of its own, tied by a veth pair to a bridge in one more
namespace; a token bucket (tc-tbf(8)) on both ends of the pair limits what the rank sends and what
it receives, full duplex. The bucket counts Ethernet frames of 1514 bytes that carry 1448 bytes of
payload, so a program can reach 95.6 % of the rate.

The delay of a link is not the namespaces': netem, which could hold packets back, is missing from
many kernels. Collectives add it to each of their operations (`shardlab.transport.link_throttle`);
what torch sends by itself, such as the norm of clipped gradients, goes without.

The namespaces have no names: they last as long as an open file or a process refers to them. The
kernel removes them with the last process, however it ends, and those of other runs and of the
machine are never touched.
"""

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from shardlab.core.errors import UserError
from shardlab.experiment.link import Link, bucket_bytes

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _IFF_RUNNING = 0x8913, 0x40
_INTERFACE = "link0"
"""name of a rank's end of its link, in its own namespace"""


class Links:
    """A link of one rate for every rank, from `with` to the end of the ranks that entered.

    with Links(2, Link(rate="100mbit")) as links:
        launch(worker, 2, threads=1, timeout_s=60, links=links)

    Args:
        link: whose delay is for others to add.

    Raises:
        UserError: (on entry) this process may not or cannot make links.
    """

    def __init__(self, world_size: int, link: Link) -> None:
        self.world_size = world_size
        self.link = link
        self._open = ExitStack()
        self._namespaces: list[int] = []
        """file descriptors, one per rank; then that of the switch"""

    def __enter__(self) -> Self:
        with ExitStack() as on_failure, ThreadPoolExecutor(1) as thread:
            on_failure.callback(self._open.close)
            # a thread has its own namespace, which its children inherit: this process stays in its
            thread.submit(self._build).result()
            on_failure.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._namespaces.clear()
        self._open.close()

    def enter(self, rank: int) -> str:
        """Moves this thread, and those it starts from then on, to the rank's end of its link.

        To be called by the process of the rank before it opens a socket or starts a thread.

        Returns:
            The name of its network interface, for GLOO_SOCKET_IFNAME.
        """
        _enter(self._namespaces[rank])
        return _INTERFACE

    def is_cut(self) -> bool:
        """Whether the rank in whose process this is called is unplugged."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH14x", _INTERFACE.encode(), 0)
            answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("H", answer, 16)
        return not flags & _IFF_RUNNING

    def cut(self, rank: int) -> None:
        """Unplugs a rank at the switch: nothing reaches it, and nothing that it sends the others.

        To be called by the process that made the links, or by a rank.
        """
        self._set_port(rank, "down")

    def fix(self, rank: int) -> None:
        """Plugs it in again."""
        self._set_port(rank, "up")

    def _set_port(self, rank: int, state: str) -> None:
        def at_the_switch() -> None:
            _enter(self._namespaces[-1])
            _run("ip", "link", "set", "dev", _port(rank), state)

        with ThreadPoolExecutor(1) as thread:
            thread.submit(at_the_switch).result()

    def _build(self) -> None:
        self._namespaces = [self._new_namespace() for _ in range(self.world_size + 1)]
        ends = self._namespaces[:-1]
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "dev", "bridge", "up")
        for rank, namespace in enumerate(ends):
            port = _port(rank)
            pair = ("ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE)
            _run(*pair, "netns", f"/proc/self/fd/{namespace}", files=[namespace])
            _run("ip", "link", "set", "dev", port, "master", "bridge", "up")
            self._limit(port)
        for rank, namespace in enumerate(ends):
            _enter(namespace)
            # addresses set apart for tests of networks (RFC 2544)
            _run("ip", "address", "add", f"198.18.0.{rank + 1}", "dev", _INTERFACE)
            _run("ip", "link", "set", "dev", _INTERFACE, "up")
            # the machine's own choice would decide the figures; this one every kernel has
            _run("ip", "route", "add", "198.18.0.0/24", "dev", _INTERFACE, "congctl", "reno")
            self._limit(_INTERFACE)

    def _new_namespace(self) -> int:
        """Moves this thread to a new one."""
        _call("unshare", _CLONE_NEWNET)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._open.callback(os.close, namespace)
        return namespace

    def _limit(self, interface: str) -> None:
        rate = self.link.bits_per_second
        bucket = ("tbf", "rate", f"{rate}bit", "burst", str(bucket_bytes(rate)))
        _run("tc", "qdisc", "add", "dev", interface, "root", *bucket, "latency", "50ms")


def interface_bytes() -> int | None:
    """What this rank has sent over its link, Ethernet headers included; None without a link."""
    return _counter(8)


def interface_frames() -> int | None:
    """How many Ethernet frames those bytes are."""
    return _counter(9)


def _counter(column: int) -> int | None:
    # /sys would show the interfaces of the namespace that it was mounted in
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == _INTERFACE:
            return int(counters.split()[column])
    return None


def _port(rank: int) -> str:
    """Name of the switch's end of a link."""
    return f"port{rank}"


def _enter(namespace: int) -> None:
    _call("setns", namespace, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno())
        raise UserError(
            f"emulated links: {name}: {reason.lower()}: run as root, or put "
            "`unshare --map-root-user` before the command"
        )


def _run(*command: str, files: Sequence[int] = ()) -> None:
    try:
        done = subprocess.run(command, pass_fds=files, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(f"emulated links need `{command[0]}`: install iproute2") from error
    if done.returncode != 0:
        told = " ".join(done.stderr.split())
        raise UserError(
            f"emulated links: `{' '.join(command)}`: {told}: does the kernel have veth, "
            "bridge and sch_tbf?"
        )
