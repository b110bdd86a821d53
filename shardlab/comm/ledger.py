"""Ledger of one rank: bytes requested, bytes sent, and the time of codecs."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor

from shardlab.comm.deferred import Deferred
from shardlab.comm.traffic import Traffic

Kind = Literal["gradients", "weights"]
Coding = Literal["encode_s", "decode_s"]
Timer = AbstractContextManager[None]


@dataclass
class Account:
    """Sums over the messages of one kind; bytes are those that this rank sends to others."""

    collectives: int = 0
    extra_collectives: int = 0
    """collectives that an uncompressed run would not need"""
    extra_collective_s: float = 0.0
    """wall time in them, including waits for other ranks"""
    bytes_raw: float = 0.0
    """bytes that the best algorithm sends uncompressed, in the dtype of the vectors"""
    bytes_wire: float = 0.0
    bytes_between_nodes: float = 0.0
    """of bytes_wire: those that a two-level collective sends between nodes"""
    index_bytes: float = 0.0
    metadata_bytes: float = 0.0
    elements: int = 0
    """elements that went through a codec"""
    elements_sent: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    not_finite: int = 0
    """results of compressed reductions that hold a NaN or an infinity on this rank; uncompressed
    ones show in the norm of the gradient, and a check of each message would cost as much"""
    uncompressed: Counter[str] = field(default_factory=Counter)
    """messages that a codec was meant for but does not support, by reason"""

    def add(self, other: "Account") -> None:
        """Add the sums of another account."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def summary(self) -> dict[str, Any]:
        """Return the sums with the ratio of raw to wire bytes and the fraction of elements sent."""
        return {
            **vars(self),
            "uncompressed": dict(self.uncompressed),
            "compression_ratio": self.bytes_raw / self.bytes_wire if self.bytes_wire else 1.0,
            "density": self.elements_sent / self.elements if self.elements else None,
        }


@dataclass
class Audit:
    """Errors of compressed reductions, as sums over this rank's shards."""

    error_squared: float = 0.0
    exact_squared: float = 0.0
    reduced_squared: float = 0.0
    product: float = 0.0

    def add(self, reduced: Tensor, exact: Tensor) -> None:
        """Add a reduced vector and the exact one."""
        reduced, exact = reduced.double(), exact.double()
        self.error_squared += float((reduced - exact).square().sum())
        self.exact_squared += float(exact.square().sum())
        self.reduced_squared += float(reduced.square().sum())
        self.product += float(torch.dot(reduced, exact))


Accounts = dict[Kind, Account]


def _new() -> Accounts:
    return {"gradients": Account(), "weights": Account()}


class Ledger:
    """Counts of all messages of one rank."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """timer of all operations, which also emulates a link"""
        self._accounts: Accounts = {}
        self._apart: dict[int, Accounts] = {}
        self._thread = threading.local()
        self.deferred: Deferred[Account] = Deferred()
        """counts and times that a device knows"""
        self.audit: Audit | None = None
        """set while compressed reductions are compared with exact ones"""
        self.reset()

    @property
    def accounts(self) -> Accounts:
        """Accounts of this thread by kind of message."""
        apart: Accounts | None = getattr(self._thread, "apart", None)
        return self._accounts if apart is None else apart

    def settle(self) -> None:
        """Read what a device knows, for counts and for times of steps; the host waits for it."""
        self.deferred.settle()
        self.traffic.settle()

    def reset(self) -> None:
        """Set all counts to 0, except those of `apart`."""
        self.settle()
        self._accounts = _new()

    @contextmanager
    def apart(self, step: int | None) -> Iterator[None]:
        """Count operations of this thread separately, for a step that may not have begun yet.

        Args:
            step: None for operations that belong to no step and are not counted.
        """
        self._thread.apart = _new() if step is None else self._apart.setdefault(step, _new())
        try:
            yield
        finally:
            # the thread is reused, also after an error
            self._thread.apart = None

    def join(self, step: int) -> None:
        """Add the counts of `apart` for a step; all its operations must have ended."""
        for kind, account in self._apart.pop(step, {}).items():
            self._accounts[kind].add(account)
            self.deferred.move(account, self._accounts[kind])

    def sums(self) -> dict[Kind, dict[str, Any]]:
        """Return all counts as plain values."""
        self.settle()
        return {
            kind: {**vars(account), "uncompressed": dict(account.uncompressed)}
            for kind, account in self._accounts.items()
        }

    def load_sums(self, sums: Mapping[Kind, Mapping[str, Any]]) -> None:
        """Continue from `sums()`."""
        for kind, values in sums.items():
            uncompressed = Counter(values["uncompressed"])
            self._accounts[kind] = Account(**{**values, "uncompressed": uncompressed})

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return bytes_raw, bytes_wire, compression_ratio and so on by kind of message."""
        self.settle()
        return {kind: account.summary() for kind, account in self._accounts.items()}

    def timed(self, account: Account, what: Coding, device: torch.device) -> Timer:
        """Add the time of the block to the account; within `extra_collective` only to `what`."""
        inside = getattr(self._thread, "extra", False)

        def read(account: Account, seconds: float) -> None:
            setattr(account, what, getattr(account, what) + seconds)
            if inside:
                account.extra_collective_s -= seconds

        return self.deferred.seconds(account, device, read)

    @contextmanager
    def extra_collective(self, account: Account, device: torch.device) -> Iterator[None]:
        """Count the block as a collective that only the codec needs, without the coding in it."""

        def read(account: Account, seconds: float) -> None:
            account.extra_collective_s += seconds

        account.extra_collectives += 1
        self._thread.extra = True
        try:
            with self.deferred.seconds(account, device, read):
                yield
        finally:
            self._thread.extra = False

    @contextmanager
    def auditing(self) -> Iterator[Audit]:
        """Repeat reductions exactly while the block runs, and compare."""
        self.audit = Audit()
        try:
            yield self.audit
        finally:
            self.audit = None
