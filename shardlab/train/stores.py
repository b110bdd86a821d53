"""Key-value stores of one attempt to run: a file for local ranks, TCP for torchrun and srun."""

import errno
import json
import os
import socket
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from ipaddress import ip_address
from typing import Self

import torch.distributed as dist

from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.train.launch_environment import RankEnvironment
from shardlab.train.rank_failure import TIMEOUTS_S, Failure, RunFailed, first

_CONNECT_S = 10.0
_POLL_S = 0.05
_REPORTS_S = 0.5
"""a rank that is killed breaks the connections of others within milliseconds"""
_EARLIER_REPORT_S = 10.0
"""longest wait for the report of a failure that came before"""
_LINGER_S = 3.0
_LAST_READ_S = 1.0


class Attempt(ABC):
    """Rendezvous of one attempt, in this order: fork the ranks, `serve`, watch."""

    interface: str | None = None
    """network interface for gloo; None: as gloo or the user chooses"""
    environment: RankEnvironment | None = None
    """of the one rank of this process; None when this process starts all ranks"""

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None:
        """Close the store of this process."""

    @abstractmethod
    def serve(self) -> None:
        """Let the ranks, which are forked by now, connect."""

    def failed_elsewhere(self, attempt: str) -> bool:
        """Return whether a rank of another process has reported a failure of this attempt."""
        return False

    @abstractmethod
    def connect(self, timeout: timedelta) -> dist.Store:
        """Open the store; called once in the process of each rank."""


class FileAttempt(Attempt):
    """Ranks that are all forked here share a memfd, which lives as long as a process opens it."""

    interface = "lo"  # gloo would look the host name up, which may not resolve

    def __init__(self) -> None:
        self._file = os.memfd_create("ranks")

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def serve(self) -> None:
        """Do nothing: the ranks have inherited the file."""

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        store = dist.FileStore(f"/proc/self/fd/{self._file}")
        store.set_timeout(timeout)
        return store


class TcpAttempt(Attempt):
    """One rank of torchrun or srun; the TCP store also carries reports of failures.

    torchrun ends and restarts processes, but each of its agents names the first failure of one node
    only, and a rank that loses a connection may fail before the one that caused it is noticed.
    """

    def __init__(self, environment: RankEnvironment) -> None:
        self.environment: RankEnvironment = environment
        self._store: dist.Store | None = None

    def __exit__(self, *_: object) -> None:
        self._store = None

    @property
    def _hosts(self) -> bool:
        return self.environment.rank == 0 and not self.environment.agent_store

    def serve(self) -> None:
        """Connect at once: a slow name server would delay the report of a failure.

        Raises:
            UserError: this process is to host the store, and the port is in use.
        """
        try:
            self._store = self._open(self._hosts, timedelta(seconds=_CONNECT_S))
        except (RuntimeError, OSError):
            if self._hosts:
                raise UserError(
                    f"port {self.environment.master_port} is in use: choose another in MASTER_PORT"
                ) from None
            # without it, every process reports its own failure

    def connect(self, timeout: timedelta) -> dist.Store:  # noqa: D102
        # the host is not the rank but its parent: the store must outlive a rank that fails
        return self._open(False, timeout)

    def failed_elsewhere(self, attempt: str) -> bool:  # noqa: D102
        if self._store is None or not attempt:
            return False
        try:
            return _reports(self._store, attempt).check(["any"])
        except RuntimeError:  # the store has ended with its host, and so has the run
            return not self.environment.agent_store

    def _open(self, host: bool, timeout: timedelta) -> dist.Store:
        address, port = self.environment.master_addr, self.environment.master_port
        listening = _listen(self.environment) if host else None
        return dist.TCPStore(
            address,
            port,
            is_master=host,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=None if listening is None else listening.detach(),
        )

    def reported(self, failure: Failure) -> UserError | RunFailed | SystemExit:
        """Share the failure with the other processes, and return what this one is to raise.

        Launchers show the output of all processes: only the first failure is reported in full.
        """
        first_failure = self._first_of_all(failure)
        # torchrun ends all its processes with the first that leaves, also the one that has to
        # report; and the store ends with its host
        if first_failure.order < failure.order:
            say(f"rank {self.environment.rank} ends, too: {first_failure.summary}")
            time.sleep(_LINGER_S)
            return SystemExit(1)
        # others still read the report; the agent of torchrun that hosts it ends with this process
        time.sleep(_LINGER_S if self._hosts else _LAST_READ_S)
        return first_failure.error()

    def _first_of_all(self, failure: Failure) -> Failure:
        """Return the first failure that was reported, or this one with the ranks that lack one."""
        if self._store is None or not failure.attempt:
            return failure
        reports = _reports(self._store, failure.attempt)
        missing = {str(rank) for rank in range(self.environment.world_size)}
        # a rank that is not the first to fail knows that another has to report
        patience = _REPORTS_S if failure.order <= 1 else _EARLIER_REPORT_S
        if failure.waited:
            patience = TIMEOUTS_S
        deadline = time.monotonic() + patience
        earliest = failure
        with suppress(RuntimeError):  # the store has ended with its host
            reports.set(str(self.environment.rank), json.dumps(asdict(failure)))
            reports.set("any", "")
            while time.monotonic() < deadline:
                new = [rank for rank in missing if reports.check([rank])]
                missing -= {*new}
                found = [Failure.of_report(reports.get(rank)) for rank in new]
                earliest = first([earliest, *found]) or failure
                # one between the first and this one may belong to a rank that waits, too: for the
                # report of a rank that was killed when it had its number
                if earliest.order <= 1 and earliest is not failure:
                    return earliest
                time.sleep(_POLL_S)
        if earliest is not failure:
            return earliest
        if missing and (failure.disconnected or failure.waited):
            return failure.without_report_of(f"rank {', '.join(sorted(missing, key=int))}")
        return failure


def _reports(store: dist.Store, attempt: str) -> dist.Store:
    return dist.PrefixStore(f"{attempt}/failures", store)


def _listen(environment: RankEnvironment) -> socket.socket | None:
    """Listen on the interface of MASTER_ADDR alone; None: leave it to torch, which takes all.

    That is needed where a hosts file maps the name of this node to loopback, which other nodes do
    not reach, and where the address is that of another machine, which forwards to this one.

    Raises:
        OSError: the port is in use.
    """
    name, port = environment.master_addr, environment.master_port
    try:
        family, *_, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        host = str(address[0])
        elsewhere = environment.local_world_size < environment.world_size
        if elsewhere and host != name and ip_address(host).is_loopback:
            return None
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise
        return None
