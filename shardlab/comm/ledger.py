"""Ledger of one rank: bytes requested, bytes sent, and the time of codecs."""

import math
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.comm.transport import Traffic
from shardlab.core.device import Timestamp, now, seconds_between

MessageKind = Literal["gradients", "weights"]
TimeName = Literal["encode_s", "decode_s", "extra_collective_s"]

_TRACKED = ("bytes_between_nodes", "collectives", "not_finite", "encode_s", "decode_s")
"""sums that `Ledger.metrics` gives under their names"""
_UNREAD = 1024
"""additions on a GPU that are kept, as times as pairs of events"""


class _Unread(NamedTuple):
    """Addition to a sum that a GPU may not have computed yet."""

    what: str
    end: torch.cuda.Event
    read: Callable[[], float]
    """once the GPU has passed `end`"""


class SharesBetweenNodes(NamedTuple):
    """Fractions of what the ranks of a group send that go to other nodes, means over the ranks."""

    exchange: float
    """where each rank sends as much to every other one"""
    ring: float
    """where each rank sends to the next one alone, as gloo and NCCL do in an all-reduce"""


def shares_between_nodes(
    group: dist.ProcessGroup, ranks_per_node: int | None
) -> SharesBetweenNodes:
    """Return the fractions for a group.

    Args:
        ranks_per_node: so many consecutive ranks are a node; None: unknown, nothing is counted.
    """
    size = dist.get_world_size(group)
    if size == 1 or ranks_per_node is None:
        return SharesBetweenNodes(0.0, 0.0)
    nodes = [rank // ranks_per_node for rank in dist.get_process_group_ranks(group)]
    pairs = sum(one != other for one in nodes for other in nodes)
    steps = sum(one != other for one, other in zip(nodes, nodes[1:] + nodes[:1], strict=True))
    return SharesBetweenNodes(pairs / (size * (size - 1)), steps / size)


@dataclass
class Account:
    """Sums over the messages of one kind; bytes are those that this rank sends to others."""

    collectives: int = 0
    extra_collectives: int = 0
    """collectives that an uncompressed run would not need"""
    extra_collective_s: float = 0.0
    """wall time in their exchanges, including waits for other ranks"""
    bytes_raw: float = 0.0
    """bytes that the best algorithm sends uncompressed, in the dtype of the vectors"""
    bytes_wire: float = 0.0
    bytes_between_nodes: float = 0.0
    """of bytes_wire: those to ranks on other nodes, a mean over the ranks of each group, by
    `shares_between_nodes`"""
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
    formats: Counter[str] = field(default_factory=Counter)
    """of bytes_wire: by codec, or dtype of what is sent uncompressed or in several phases, and the
    dtype of the sums"""
    _unread: deque[_Unread] = field(default_factory=deque)

    def __str__(self) -> str:
        """Say by how much messages were shorter, or what most of the uncompressed ones had, and
        what most of the bytes were."""
        ratio = self.bytes_raw / self.bytes_wire
        # a header of each message is no expansion worth a word
        is_shorter = abs(ratio - 1) >= 0.01
        reasons = [] if is_shorter else self.uncompressed.most_common(1)
        about = [name.removeprefix("torch.") for name, _ in reasons + self.formats.most_common(1)]
        said = f"{ratio:.3g} x" if is_shorter else "uncompressed"
        return f"{said} ({'; '.join(about)})" if about else said

    def add(self, other: "Account") -> None:
        """Add the sums of another account."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def add_sent(self, nbytes: float, share: float, format: str | None = None) -> None:
        """Add bytes that were sent, of which this fraction leaves the node.

        Args:
            format: by which `formats` counts them; None: metadata.
        """
        self.bytes_wire += nbytes
        if format is not None:
            self.formats[format] += nbytes  # type: ignore[assignment]  # bytes may be fractions
        self.bytes_between_nodes += share * nbytes

    def add_time(
        self, what: TimeName, begin: Timestamp, device: torch.device, sign: int = 1
    ) -> None:
        """Add the time since `begin`, on a GPU that of the current stream's work."""
        if isinstance(begin, float):
            setattr(self, what, getattr(self, what) + sign * (perf_counter() - begin))
            return
        end = now(device)
        self._add_later(what, end, lambda: sign * seconds_between(begin, end))

    def count_not_finite(self, largest: Tensor) -> None:
        """Count a result, on a GPU without a wait, by its largest magnitude: NaN with a NaN."""
        if largest.device.type == "cpu":
            self.not_finite += not math.isfinite(largest.item())
            return
        # a count on the GPU would be one of several streams: those of shards and of replicas
        on_host = largest.to("cpu", non_blocking=True)
        end = now(largest.device)
        self._add_later("not_finite", end, lambda: not math.isfinite(on_host.item()))

    def _add_later(self, what: str, end: Timestamp, read: Callable[[], float]) -> None:
        """Add to a sum what can be read when the GPU has passed `end`."""
        assert not isinstance(end, float), "of a GPU"
        self._unread.append(_Unread(what, end, read))
        while len(self._unread) > _UNREAD and self._unread[0].end.query():
            self._read(self._unread.popleft())

    def sums(self) -> dict[str, Any]:
        """Return all sums as plain values; the host waits for the device."""
        while self._unread:
            self._unread[0].end.synchronize()
            self._read(self._unread.popleft())
        counts = {name: dict(getattr(self, name)) for name in ("uncompressed", "formats")}
        values = {**vars(self), **counts}
        del values["_unread"]
        return values

    def summary(self) -> dict[str, Any]:
        """Return the sums with the ratio of raw to wire bytes and the fraction of elements sent."""
        return {
            **self.sums(),
            "compression_ratio": self.bytes_raw / self.bytes_wire if self.bytes_wire else 1.0,
            "density": self.elements_sent / self.elements if self.elements else None,
        }

    def _read(self, unread: _Unread) -> None:
        setattr(self, unread.what, getattr(self, unread.what) + unread.read())


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


Accounts = dict[MessageKind, Account]


def _new() -> Accounts:
    return {"gradients": Account(), "weights": Account()}


class Ledger:
    """Counts of all messages of one rank.

    Args:
        ranks_per_node: so many consecutive ranks are a node; by default as the launcher says.
    """

    def __init__(self, ranks_per_node: int | None = None) -> None:
        launched = os.environ.get("LOCAL_WORLD_SIZE")
        self.ranks_per_node = ranks_per_node or (int(launched) if launched else None)
        """None: unknown, and `bytes_between_nodes` is 0"""
        self.traffic = Traffic()
        """timer of all operations, which also emulates a link"""
        self.gradients_of_step = 0.0
        """bytes that gradients between replicas would have in a step, where these are not sent"""
        self.audit: Audit | None = None
        """set while compressed reductions are compared with exact ones"""
        self._accounts = _new()
        self._of_steps: dict[int, Accounts] = {}
        self._thread = threading.local()
        self._numbers: list[tuple[torch.cuda.Event, Tensor, Callable[[float], None]]] = []
        """of `read`, on their way to the host"""

    @property
    def accounts(self) -> Accounts:
        """Accounts of this thread by kind of message."""
        of_step: Accounts | None = getattr(self._thread, "of_step", None)
        return self._accounts if of_step is None else of_step

    @property
    def bytes_wire(self) -> float:
        """Bytes that this rank has sent since `reset`."""
        return sum(account.bytes_wire for account in self._accounts.values())

    def __str__(self) -> str:
        """Say in one line what this rank has sent, and what compression saved."""
        raw = sum(account.bytes_raw for account in self._accounts.values())
        if dist.is_initialized() and dist.get_world_size() == 1:
            return "one rank: nothing is sent"
        if not (raw and self.bytes_wire):
            return "nothing sent yet"
        sent = [(kind, account) for kind, account in self._accounts.items() if account.bytes_wire]
        parts = ", ".join(f"{kind} {account}" for kind, account in sent)
        percent = 100 * (1 - self.bytes_wire / raw)
        saved = f"{percent:.1f} % saved" if percent > 0 else f"{-percent:.1f} % more"
        saved = saved if abs(percent) >= 1 else "nothing saved"
        factor, unit = (1e6, "MB") if min(raw, self.bytes_wire) >= 1e6 else (1e3, "kB")
        wire, raw = self.bytes_wire / factor, raw / factor
        return f"sent {wire:,.1f} of {raw:,.1f} {unit}, {saved}: {parts}"

    def read(self, number: Tensor, take: Callable[[float], None]) -> None:
        """Call `take` with a number, []: now, or of a GPU by `wait`, which alone waits for it."""
        on_host = number.to("cpu", non_blocking=True)
        end = now(number.device)
        if isinstance(end, float):
            take(on_host.item())
        else:
            self._numbers.append((end, on_host, take))

    def wait(self) -> None:
        """Wait until a GPU has done its steps, and read their times and numbers."""
        self.traffic.wait()
        numbers, self._numbers = self._numbers, []
        for end, on_host, take in numbers:
            end.synchronize()
            take(on_host.item())

    def reset(self) -> None:
        """Set all counts to 0, except those of `step_accounts`."""
        self._accounts = _new()

    @contextmanager
    def step_accounts(self, step: int | None) -> Iterator[None]:
        """Count operations of this thread separately, for a step that may not have begun yet.

        Args:
            step: None for operations that belong to no step and are not counted.
        """
        self._thread.of_step = _new() if step is None else self._of_steps.setdefault(step, _new())
        try:
            yield
        finally:
            # the thread is reused, also after an error
            self._thread.of_step = None

    def merge_step(self, step: int) -> None:
        """Add the counts of `step_accounts` for a step, all of whose operations have ended."""
        for kind, account in self._of_steps.pop(step, {}).items():
            self._accounts[kind].add(account)

    def sums(self) -> dict[MessageKind, dict[str, Any]]:
        """Return all counts as plain values."""
        self.wait()
        return {kind: account.sums() for kind, account in self._accounts.items()}

    def load_sums(self, sums: Mapping[MessageKind, Mapping[str, Any]]) -> None:
        """Continue from `sums()`."""
        for kind, values in sums.items():
            counts = {k: Counter(v) for k, v in values.items() if isinstance(v, Mapping)}
            self._accounts[kind] = Account(**{**values, **counts})

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return bytes_raw, bytes_wire, compression_ratio and so on by kind of message."""
        self.wait()
        return {kind: account.summary() for kind, account in self._accounts.items()}

    def metrics(self) -> dict[str, float]:
        """Return the counts of all kinds of messages as numbers by name, for `Handle.metrics`."""
        kinds = self.summary()

        def total(name: str) -> float:
            value: float = sum(account[name] for account in kinds.values())
            return value

        raw, sent = total("bytes_raw"), total("bytes_wire")
        messages = sum(sum(account["uncompressed"].values()) for account in kinds.values())
        metrics = {
            "comm/bytes_sent": sent,
            "comm/bytes_raw": raw,
            "comm/ratio": raw / sent if sent else 1.0,
            "comm/uncompressed_messages": messages,
            **{f"comm/{name}": total(name) for name in _TRACKED},
        }
        for kind, account in kinds.items():
            if account["bytes_raw"]:
                metrics[f"comm/{kind}_bytes_sent"] = account["bytes_wire"]
                metrics[f"comm/{kind}_ratio"] = account["compression_ratio"]
        return metrics

    @contextmanager
    def auditing(self) -> Iterator[Audit]:
        """Repeat reductions exactly while the block runs, and compare."""
        self.audit = Audit()
        try:
            yield self.audit
        finally:
            self.audit = None
