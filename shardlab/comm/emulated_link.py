"""Emulation of a network link between the ranks of one machine (Linux).

Every node of one or more ranks is a network namespace, connected by a veth pair to a bridge in one
more namespace; a token bucket (tc-tbf(8)) on both ends of the pair limits what the node sends and
what it receives, full duplex. The ranks of a node share its link, and use its loopback interface
among themselves. The bucket counts Ethernet frames of 1514 bytes that carry 1448 bytes of payload,
so a program can reach 95.6 % of the rate.

The namespaces do not emulate the delay: netem, which could hold packets back, is missing from many
kernels. Collectives add it to each of their operations (`LinkThrottle`);
what torch sends by itself, such as the norm of clipped gradients, has no delay.

The namespaces are anonymous: they last as long as an open file or a process refers to them. The
kernel removes them with the last process, however it ends, and no namespace of another run or of
the machine is touched.
"""

import ctypes
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self

import torch.distributed as dist
from torch.profiler import record_function

from shardlab.core.errors import UserError
from shardlab.core.link import Link, bucket_bytes
from shardlab.core.progress import say
from shardlab.profiling.labels import LINK
from shardlab.results.result import LinkEmulation

_CLONE_NEWNET = 0x40000000
_LOOPBACK = "lo"
_INTERFACE = "link0"
"""name of a node's end of its link, inside the namespace of the node"""


class LinkThrottle:
    """Emulated link of one rank: delays the end of its operations as the link would.

    An operation between nodes that is issued at t and moves b bytes ends no earlier than
    max(t, when the link is free) + 8 b / rate + delay; the link is free again `delay` before that.
    Both directions of the link are alike, so b is the larger one of bytes sent and received.

    Args:
        bits_per_second: None where network namespaces limit the rate.
        ranks_per_node: so many consecutive ranks are a node.
    """

    def __init__(
        self, delay_ms: float, bits_per_second: int | None = None, ranks_per_node: int = 1
    ) -> None:
        self._delay_s = delay_ms / 1e3
        self._bits_per_second = bits_per_second
        self._ranks_per_node = ranks_per_node
        self._free = 0.0
        # the main thread and `Background` threads share the link
        self._lock = Lock()

    def connects(self, group: dist.ProcessGroup) -> bool:
        """Return whether the ranks of the group are on several nodes."""
        ranks = dist.get_process_group_ranks(group)
        return len({rank // self._ranks_per_node for rank in ranks}) > 1

    def carry(self, nbytes: float) -> float:
        """Reserve the link for an operation issued now; return when its last byte is sent.

        Times are those of `time.perf_counter`.
        """
        seconds = 8 * nbytes / self._bits_per_second if self._bits_per_second else 0.0
        with self._lock:
            self._free = max(time.perf_counter(), self._free) + seconds
            return self._free

    def end(self, carried: float) -> None:
        """Sleep until the end of an operation whose last byte is sent at `carried`."""
        left = carried + self._delay_s - time.perf_counter()
        if left > 0:
            with record_function(LINK):
                time.sleep(left)


class Links:
    """Network namespaces that limit every node to a rate.

    They exist from `with` to the end of the last rank that entered one.

    with Links(2, Link(rate="100mbit")) as links:
        launch(worker, 2, threads=1, timeout_s=60, links=links)

    Args:
        link: its rate is used here; `LinkThrottle` adds its delay.

    Raises:
        UserError: the link is for another number of ranks; or (on entry) this process may not or
            cannot create namespaces.
    """

    def __init__(self, world_size: int, link: Link) -> None:
        self.link = link
        self._rates = link.rates_of_nodes(world_size)
        self._open = ExitStack()
        self._namespaces: list[int] = []
        """file descriptors, one per node; then that of the bridge"""

    def __enter__(self) -> Self:
        with ExitStack() as on_failure, ThreadPoolExecutor(1) as thread:
            on_failure.callback(self._open.close)
            # namespaces belong to threads: the rest of this process keeps its own
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
        """Move this thread, and those that it starts later, into the namespace of the rank's node.

        Call it in the process of the rank before it opens a socket or starts a thread. Where nodes
        have several ranks, LOCAL_RANK and LOCAL_WORLD_SIZE become those of the node.

        Returns:
            The name of its network interface, for GLOO_SOCKET_IFNAME.
        """
        node, local_rank = divmod(rank, self.link.ranks_per_node)
        _enter(self._namespaces[node])
        if self.link.ranks_per_node > 1:
            os.environ["LOCAL_RANK"] = str(local_rank)
            os.environ["LOCAL_WORLD_SIZE"] = str(self.link.ranks_per_node)
        return _INTERFACE

    def _build(self) -> None:
        self._namespaces = [self._new_namespace() for _ in range(len(self._rates) + 1)]
        nodes = [*zip(self._namespaces[:-1], self._rates, strict=True)]
        _run("ip", "link", "add", "bridge", "type", "bridge")
        _run("ip", "link", "set", "dev", "bridge", "up")
        for node, (namespace, rate) in enumerate(nodes):
            port = f"port{node}"
            pair = ("ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE)
            _run(*pair, "netns", f"/proc/self/fd/{namespace}", files=[namespace])
            _run("ip", "link", "set", "dev", port, "master", "bridge", "up")
            _limit(port, rate)
        for node, (namespace, rate) in enumerate(nodes):
            _enter(namespace)
            # what ranks of one node send to its address passes here
            _run("ip", "link", "set", "dev", _LOOPBACK, "up")
            # addresses reserved for network tests (RFC 2544)
            _run("ip", "address", "add", f"198.18.0.{node + 1}", "dev", _INTERFACE)
            _run("ip", "link", "set", "dev", _INTERFACE, "up")
            # the machine's default congestion control would change results; every kernel has reno
            _run("ip", "route", "add", "198.18.0.0/24", "dev", _INTERFACE, "congctl", "reno")
            _limit(_INTERFACE, rate)

    def _new_namespace(self) -> int:
        """Move this thread into a new namespace; return its file descriptor."""
        _call("unshare", _CLONE_NEWNET)
        namespace = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._open.callback(os.close, namespace)
        return namespace


class LinkCounters(NamedTuple):
    """Bytes and frames that the ranks of this rank's node have sent, headers included."""

    nbytes: int
    """over the link to other nodes"""
    frames: int
    """Ethernet frames of these"""
    inside: int
    """bytes over loopback, to each other"""


def link_counters() -> LinkCounters | None:
    """Return what the node of this rank has sent; None without a link in namespaces."""
    sent = {}
    # not /sys: it shows the interfaces of the namespace in which it was mounted
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        sent[name.strip()] = counters.split()[8:10]
    if _INTERFACE not in sent:
        return None
    nbytes, frames = map(int, sent[_INTERFACE])
    return LinkCounters(nbytes, frames, int(sent[_LOOPBACK][0]))


def _limit(interface: str, rate: int) -> None:
    bucket = ("tbf", "rate", f"{rate}bit", "burst", str(bucket_bytes(rate)))
    _run("tc", "qdisc", "add", "dev", interface, "root", *bucket, "latency", "50ms")


def _enter(namespace: int) -> None:
    _call("setns", namespace, _CLONE_NEWNET)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        reason = os.strerror(ctypes.get_errno()).lower()
        raise UserError(f"emulated links: {name}: {reason}: {_fix(reason)}")


def _fix(reason: str) -> str:
    if "not permitted" not in reason:
        return "does the kernel have veth, bridge and sch_tbf?"
    if os.geteuid() == 0:
        return "start the container with --cap-add NET_ADMIN --cap-add SYS_ADMIN"
    return "run as root, or put `unshare --map-root-user` before the command"


def _run(*command: str, files: Sequence[int] = ()) -> None:
    try:
        done = subprocess.run(command, pass_fds=files, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise UserError(f"emulated links need `{command[0]}`: install iproute2") from error
    if done.returncode != 0:
        reason = " ".join(done.stderr.split())
        raise UserError(f"emulated links: `{' '.join(command)}`: {reason}: {_fix(reason)}")


class Loopback:
    """Plain loopback, for ranks that emulate their link in-process."""

    def enter(self, rank: int) -> str:
        """Return the name of the network interface; the rank keeps its namespace."""
        return _LOOPBACK


class Emulation(NamedTuple):
    """Settings of link emulation for the launcher and for the collectives of each rank."""

    links: Links | Loopback | None
    """for `shardlab.train.launch.launch`"""
    throttle: LinkThrottle | None
    """for `shardlab.engines.build.build_engine`, in the process of each rank"""
    kind: LinkEmulation


@contextmanager
def emulated(link: Link | None, world_size: int) -> Iterator[Emulation]:
    """Emulate `link` between `world_size` ranks while the block runs; do nothing without a link.

    Network namespaces limit the rate where this process may create them; elsewhere the collectives
    of each rank do, with one line on stderr. The collectives add the delay in both cases.
    What the ranks of a node share, and rates that differ, only namespaces limit.

        with emulated(link, 2) as emulation:
            launch(partial(worker, emulation.throttle), 2, threads=1, timeout_s=60,
                   links=emulation.links)

    Raises:
        UserError: the link is for another number of ranks, or nodes have several ranks or different
            rates and this process may not create namespaces.
    """
    if link is None:
        yield Emulation(None, None, "none")
        return
    with ExitStack() as stack:
        namespaces = Links(world_size, link)
        try:
            links = stack.enter_context(namespaces)
        except UserError as error:
            if link.ranks_per_node > 1 or not isinstance(link.rate, str):
                raise UserError(f"link of {link.name}: nodes need namespaces: {error}") from None
            say(f"link of {link.name}: the ranks emulate it in-process ({error})")
            throttle = LinkThrottle(link.delay_ms, link.bits_per_second)
            emulation = Emulation(Loopback(), throttle, "in-process")
        else:
            delay = LinkThrottle(link.delay_ms, None, link.ranks_per_node)
            emulation = Emulation(links, delay if link.delay_ms else None, "namespaces")
        yield emulation
