"""The ledger: what one rank asked to move, what moved, and what the codec cost."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor

from shardlab.transport.traffic import Traffic

Kind = Literal["gradients", "weights"]


@dataclass
class Account:
    """Sums over the messages of one kind; bytes are those that this rank sends to others."""

    collectives: int = 0
    extra_collectives: int = 0
    """collectives that an uncompressed run would not need"""
    extra_collective_s: float = 0.0
    """wall time in them, waits for other ranks included"""
    bytes_raw: float = 0.0
    """what the operation has to send in the dtype it was asked for, by the best algorithm"""
    bytes_wire: float = 0.0
    bytes_between_nodes: float = 0.0
    """of bytes_wire: what a two-level collective sends from node to node"""
    index_bytes: float = 0.0
    metadata_bytes: float = 0.0
    elements: int = 0
    """elements that went through a codec"""
    elements_sent: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    not_finite: int = 0
    """results of reductions that hold a NaN or an infinity, as far as this rank sees them"""
    uncompressed: Counter[str] = field(default_factory=Counter)
    """messages that a codec was meant for but did not touch, by reason"""

    def add(self, other: "Account") -> None:
        """Takes in the sums of another one."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def summary(self) -> dict[str, Any]:
        """The sums with the ratio of raw to wire bytes and the share of elements sent."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **values,
            "uncompressed": dict(self.uncompressed),
            "compression_ratio": self.bytes_raw / self.bytes_wire if self.bytes_wire else 1.0,
            "density": self.elements_sent / self.elements if self.elements else None,
        }


@dataclass
class Audit:
    """Compressed against exact reductions of the same vectors, as sums over this rank's shards."""

    error_squared: float = 0.0
    exact_squared: float = 0.0
    reduced_squared: float = 0.0
    product: float = 0.0

    def add(self, reduced: Tensor, exact: Tensor) -> None:
        """Takes in one reduced vector and its exact counterpart."""
        reduced, exact = reduced.double(), exact.double()
        self.error_squared += float((reduced - exact).square().sum())
        self.exact_squared += float(exact.square().sum())
        self.reduced_squared += float(reduced.square().sum())
        self.product += float(torch.dot(reduced, exact))


Accounts = dict[Kind, Account]


def _new() -> Accounts:
    return {"gradients": Account(), "weights": Account()}


class Ledger:
    """Counts every message of one rank; `reset` starts anew."""

    def __init__(self) -> None:
        self.traffic = Traffic()
        """what every message passes through on its way"""
        self._accounts: Accounts = {}
        self._apart: dict[int, Accounts] = {}
        self._thread = threading.local()
        self.audit: Audit | None = None
        """set while exact reductions run beside the compressed ones"""
        self.reset()

    @property
    def accounts(self) -> Accounts:
        """By kind of message."""
        apart: Accounts | None = getattr(self._thread, "apart", None)
        return self._accounts if apart is None else apart

    def reset(self) -> None:
        """Forgets all counts, but for those apart."""
        self._accounts = _new()

    @contextmanager
    def apart(self, step: int | None) -> Iterator[None]:
        """While the block runs, its thread counts for a step that may not have begun yet.

        Args:
            step: None for what is of no step, which nobody counts.
        """
        self._thread.apart = _new() if step is None else self._apart.setdefault(step, _new())
        try:
            yield
        finally:
            self._thread.apart = None

    def join(self, step: int) -> None:
        """Counts what was counted apart for a step; all of that has ended."""
        for kind, account in self._apart.pop(step, {}).items():
            self._accounts[kind].add(account)

    def sums(self) -> dict[Kind, dict[str, Any]]:
        """All counts as plain values."""
        return {
            kind: {**vars(account), "uncompressed": dict(account.uncompressed)}
            for kind, account in self._accounts.items()
        }

    def load_sums(self, sums: Mapping[Kind, Mapping[str, Any]]) -> None:
        """Continues from `sums()`."""
        for kind, values in sums.items():
            uncompressed = Counter(values["uncompressed"])
            self._accounts[kind] = Account(**{**values, "uncompressed": uncompressed})

    def summary(self) -> dict[str, dict[str, Any]]:
        """Per kind of message: bytes_raw, bytes_wire, compression_ratio, collectives and more."""
        return {kind: account.summary() for kind, account in self._accounts.items()}

    @contextmanager
    def auditing(self) -> Iterator[Audit]:
        """While the block runs, reductions are repeated exactly and compared."""
        self.audit = Audit()
        try:
            yield self.audit
        finally:
            self.audit = None


@contextmanager
def timed(account: Account, what: Literal["encode_s", "decode_s"]) -> Iterator[None]:
    """Adds the wall time of the block to the account."""
    start = perf_counter()
    yield
    setattr(account, what, getattr(account, what) + perf_counter() - start)


@contextmanager
def extra_collective(account: Account) -> Iterator[None]:
    """Counts the block as a collective that only the codec needs; coding in it is told apart."""
    seconds, coding = account.extra_collective_s, account.encode_s + account.decode_s
    start = perf_counter()
    yield
    coding = account.encode_s + account.decode_s - coding
    account.extra_collectives += 1
    account.extra_collective_s = seconds + perf_counter() - start - coding
