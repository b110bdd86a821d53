"""Contract of collectives."""

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardlab.codecs.base import Unit
from shardlab.codecs.wire import VERSION, PayloadError
from shardlab.comm.ledger import Account, Audit, Ledger, MessageKind, shares_between_nodes
from shardlab.comm.object_collectives import gather_values
from shardlab.comm.transport import Transport
from shardlab.core.device import now
from shardlab.profiling.labels import COMMUNICATION

REPLICAS = "@replicas"
"""suffix of units that are summed over the replicas of a two-dimensional mesh"""

_SAME = "make codec, options, seed, model, step and the version of shardlab the same on all ranks"
_UNUSED = (
    "; where some of them do not use every parameter, call set_reduce_scatter_unused_params(True) "
    "of fully_shard (torch 2.13 or newer)"
)

_Call = TypeVar("_Call", bound=Callable[..., Any])


def labelled(method: _Call) -> _Call:
    """Label the method in profiles with the name of its unit, the last argument.

    A backward pass inside of `torch.autocast` calls it, too, and products of codecs are in float32.
    """

    @wraps(method)
    def call(*args: Any) -> Any:
        vector, unit = args[1], args[-1]
        exact = torch.autocast(vector.device.type, enabled=False)
        with record_function(COMMUNICATION + unit.name), exact:
            return method(*args)

    return cast(_Call, call)


class Collective(ABC):
    """reduce-scatter, all-reduce and all-gather of float vectors over one process group.

    Laws:
    - all ranks hold the same bytes of a result that several of them hold;
    - the ledger counts, under `kind`, the bytes that this rank sends to others;
    - a message belongs to a `unit`, which is the same on all ranks and in all steps;
    - profiles show the unit of an operation, where a method is `labelled`.

    All ranks call the collectives of one group in the same order, as in torch.

    Args:
        extra: the ledger counts these collectives as ones that only compression needs.
        audited: compare reductions with exact ones while the ledger has an audit; not where another
            collective does, of which this one is a part.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: MessageKind,
        extra: bool = False,
        audited: bool = True,
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.kind = kind
        self.transport = Transport(group, ledger.traffic)
        self._between_nodes = shares_between_nodes(group, ledger.ranks_per_node)
        self.world_size = self.transport.world_size
        self.rank = self.transport.rank
        self._extra, self._audited = extra, audited
        self.watch: Callable[[Tensor, Tensor], None] | None = None
        """called with what this rank has added to a sum, and the sum, where a collective knows
        both: of all elements, or of the chunk whose payloads it decodes"""
        self.settings = ""
        """what else must be equal on all ranks, in words"""
        self._agreed: set[tuple[str, int, str]] = set()

    @property
    def account(self) -> Account:
        """Counts of the messages of this collective's kind."""
        return self.ledger.accounts[self.kind]

    @abstractmethod
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """Set output[n] to scale * sum over ranks of chunk `rank` of vector[world_size * n]."""

    @abstractmethod
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Set vector[n] to scale * sum over ranks of vector, in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Set output[world_size * n] to the concatenated shards[n] of all ranks.

        `shard` may be this rank's part of `output`.
        """

    @property
    def keeps_residuals(self) -> bool:
        """Return whether what a message lacks is added to a later one."""
        return False

    def return_to_residuals(self, vector: Tensor, unit: Unit) -> None:  # noqa: B027
        """Add to the residuals of `unit` what its last all-reduce gave, but nobody applies.

        Args:
            vector: [n], the same on all ranks; zeros elsewhere.
        """

    def any_rank(self, flags: Tensor) -> None:
        """Set flags[m], int32 of 0 and 1, to 1 where a rank has 1: an extra collective."""
        begin, nbytes = now(flags.device), 2 * self._share_of_others(flags.nbytes)
        with self.ledger.traffic.operation(nbytes, flags.device, self.group):
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        account = self.account
        account.add_time("extra_collective_s", begin, flags.device)
        account.collectives += 1
        account.extra_collectives += 1
        account.add_sent(nbytes, self._between_nodes.ring)
        account.metadata_bytes += nbytes

    def close(self) -> None:  # noqa: B027
        """Release the process groups that this collective has made; nothing is sent any more."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that later messages depend on, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""

    def note_pass(self, unit: Unit, is_backward: bool) -> None:  # noqa: B027
        """Note, before parameters are gathered or reduced, in which pass that is.

        Random codecs draw new numbers in a forward pass after a backward pass of the unit.
        """

    def _agree(self, unit: Unit, vector: Tensor, codec: str, step: int = 0) -> None:
        """Compare, before the first message of a unit, size and codec, what the ranks will send,
        and `settings`.

        gloo aborts the process, without an error, when a message has an unexpected size. Each rank
        sends the others 8 bytes, a digest; only where they differ the texts follow.

        Raises:
            PayloadError: on all ranks, in one line: the ranks differ.
        """
        key = unit.name, vector.numel(), codec
        if key in self._agreed or self.world_size == 1:
            return
        text = f"codec {codec}, {vector.numel()} elements, step {step}{self.settings}"
        n = vector.numel()
        self.compare(f"version {VERSION}, unit {unit.name!r}, {text}", vector.device, n)
        self._agreed.add(key)

    def compare(self, text: str, device: torch.device, n: int = 0, fix: str = _SAME) -> None:
        """Compare what must be equal on all ranks, by a digest of 8 bytes.

        Args:
            n: elements of the message that the text describes.
            fix: end of the error's line.

        Raises:
            PayloadError: on all ranks, in one line: the ranks differ.
        """
        digest = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        number = torch.tensor([digest - (1 << 63)], device=device)
        numbers = number.repeat(self.world_size)
        self._send_numbers([number] * self.world_size, numbers.split(1))
        if not bool((numbers == number).all()):
            raise PayloadError(self._differences(text, n, fix))

    def _differences(self, text: str, n: int, fix: str) -> str:
        ranks, sizes = defaultdict(list), set()
        values = gather_values((text, n), self.group)
        members = dist.get_process_group_ranks(self.group)
        for rank, (other, size) in zip(members, values, strict=True):
            ranks[other].append(str(rank))
            sizes.add(size)
        settings = "; ".join(f"rank {', '.join(which)}: {what}" for what, which in ranks.items())
        return f"ranks differ in what they send: {settings}: {fix}" + (
            _UNUSED if len(sizes) > 1 and self.kind == "gradients" else ""
        )

    def _send_numbers(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Exchange a number of 8 bytes with every rank: an extra collective, and metadata."""
        self._all_to_all(inputs, outputs, extra=True)
        account, nbytes = self.account, 8 * (self.world_size - 1)
        account.collectives += 1
        account.extra_collectives += 1
        account.add_sent(nbytes, self._between_nodes.exchange)
        account.metadata_bytes += nbytes

    def _all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], extra: bool = False
    ) -> None:
        """Exchange the messages of one collective; add the time of one that is extra."""
        if not (extra or self._extra):
            self.transport.all_to_all(inputs, outputs)
            return
        begin = now(inputs[0].device)
        self.transport.all_to_all(inputs, outputs)
        self.account.add_time("extra_collective_s", begin, inputs[0].device)

    def _count(self, raw: float, wire: float, ring: bool = False) -> None:
        """Count a collective.

        Args:
            ring: whether its bytes go round the ranks, not from each to all others.
        """
        account = self.account
        account.collectives += 1
        account.extra_collectives += self._extra
        account.bytes_raw += raw
        account.add_sent(wire, self._between_nodes.ring if ring else self._between_nodes.exchange)

    def _share_of_others(self, nbytes: int) -> float:
        """Return (W-1)/W of a full vector: what a reduce-scatter or all-gather sends per rank."""
        return nbytes * (self.world_size - 1) / self.world_size

    def _chunks(self, vector: Tensor) -> tuple[Tensor, ...]:
        """Return the W equal parts of a vector."""
        return vector.view(self.world_size, vector.numel() // self.world_size).unbind()

    def _padded(self, vector: Tensor) -> Tensor:
        """Return the vector, padded with zeros to a multiple of W elements."""
        n, size = vector.numel(), self.world_size
        return vector if n % size == 0 else torch.nn.functional.pad(vector, (0, -n % size))

    @property
    def _audit(self) -> Audit | None:
        """Audit that this collective's reductions are compared for, while there is one."""
        return self.ledger.audit if self._audited else None

    def _compare_exactly(self, reduced: Tensor, vector: Tensor, scale: float) -> None:
        """While auditing, compare a reduction with the exact one, whose bytes are not counted.

        Args:
            reduced: this rank's shard of the sum.
            vector: input of this rank, [world_size * n].
        """
        audit = self._audit
        if audit is None:
            return
        chunks, exact = self._chunks(vector), torch.empty_like(reduced)
        parts = [torch.empty_like(chunk) for chunk in chunks]
        parts[self.rank] = chunks[self.rank]
        self.transport.all_to_all(chunks, parts)
        add_up(parts, exact, scale)
        audit.add(reduced, exact)


class WarmUp(Collective):
    """Collective of the gradients between replicas, which is used in the first steps alone.

    Args:
        collective: of those steps.
        is_over: returns whether gradients stay as they are.
    """

    def __init__(self, collective: Collective, is_over: Callable[[], bool]) -> None:
        super().__init__(collective.group, collective.ledger, collective.kind)
        self.is_over = is_over
        self._collective = collective

    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        if not self.is_over():
            self._collective.all_reduce(vector, scale, unit)

    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._collective.reduce_scatter(output, vector, scale, unit)

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        self._collective.all_gather(output, shard, unit)


def add_up(parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """Write scale * (part 0 + part 1 + ...) to `out`, summed in this order, at least in float32.

    The order is fixed since float32 sums depend on it and all ranks need the same bits.
    """
    if out.element_size() < 4:
        total = torch.empty_like(out, dtype=torch.float32)
        add_up([part.float() for part in parts], total, scale)
        out.copy_(total)
        return
    first, *others = parts
    if not others:
        torch.mul(first, scale, out=out)
        return
    torch.add(first, others[0], out=out)
    for part in others[1:]:
        out.add_(part)
    if scale != 1:
        out.mul_(scale)
