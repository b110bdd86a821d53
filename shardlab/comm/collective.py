"""Contract of collectives, the uncompressed ones, and the contract of modules that use them."""

import hashlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import VERSION, Buffers, PayloadError
from shardlab.comm.ledger import Account, Kind, Ledger
from shardlab.comm.object_collectives import gather_bytes
from shardlab.comm.transport import Traffic, Transport
from shardlab.core.device import now
from shardlab.profiling.labels import COMMUNICATION

REPLICAS = "@replicas"
"""suffix of units that are summed over the replicas of a two-dimensional mesh"""

_Method = TypeVar("_Method", bound=Callable[..., Any])
_Future = torch.futures.Future[list[Tensor]]


def labelled(method: _Method) -> _Method:
    """Label the method in profiles with the name of its unit, the last argument."""

    @wraps(method)
    def call(*args: Any) -> Any:
        with record_function(COMMUNICATION + args[-1].name):
            return method(*args)

    return cast(_Method, call)


class FutureWork(dist.Work):
    """Work that ends with a future, whose value is a list of results as in torch."""

    def __init__(self, future: _Future) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the end; raise the error of the operation. The group's timeout applies."""
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return self._future.done()

    def get_future(self) -> _Future:
        """Return the future."""
        return self._future


class CompletedWork(FutureWork):
    """Work of an operation that was completed (on a GPU: issued) before it is returned."""

    def __init__(self, result: Tensor) -> None:
        future: _Future = torch.futures.Future()
        future.set_result([result])
        super().__init__(future)


class Collective(ABC):
    """reduce-scatter, all-reduce and all-gather of float vectors over one process group.

    Laws:
    - all ranks hold the same bytes of a result that several of them hold;
    - the ledger counts, under `kind`, the bytes that this rank sends to others;
    - a message belongs to a `unit`, which is the same on all ranks and in all steps;
    - `start_*` followed by `wait()` has the bits and the counts of the blocking form;
    - profiles show the unit of an operation, where a method is `labelled`.

    Between `start_*` and the end of `wait()` callers must not use the tensors. All ranks call the
    collectives of one group in the same order, as in torch.

    Args:
        extra: the ledger counts these collectives as ones that only compression needs.
    """

    elementwise: ClassVar[bool] = False
    """whether all_reduce treats elements independently: the grouping into messages may change"""

    def __init__(
        self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind, extra: bool = False
    ) -> None:
        self.group = group
        self.ledger = ledger
        self.kind = kind
        self.transport = Transport(group, ledger.traffic)
        self.world_size = self.transport.world_size
        self.rank = self.transport.rank
        self._extra = extra
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

    def start_reduce_scatter(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit
    ) -> dist.Work:
        """Start `reduce_scatter`; by default it is completed on return."""
        self.reduce_scatter(output, vector, scale, unit)
        return CompletedWork(output)

    def start_all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> dist.Work:
        """Start `all_reduce`; by default it is completed on return."""
        self.all_reduce(vector, scale, unit)
        return CompletedWork(vector)

    def start_all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> dist.Work:
        """Start `all_gather`; by default it is completed on return."""
        self.all_gather(output, shard, unit)
        return CompletedWork(output)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state that later messages depend on, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continue from `state_dict()`."""

    def _agree(self, unit: Unit, vector: Tensor, codec: str, step: int = 0) -> None:
        """Compare, before the first message of a unit, size and codec, what the ranks will send.

        gloo aborts the process, without an error, when a message has an unexpected size. Each rank
        sends the others 8 bytes, a digest; only where they differ the texts follow.

        Raises:
            PayloadError: on all ranks, in one line: the ranks differ.
        """
        key = unit.name, vector.numel(), codec
        if key in self._agreed or self.world_size == 1:
            return
        text = f"codec {codec}, {vector.numel()} elements, step {step}"
        identity = f"{VERSION}\0{unit.name}\0{text}".encode()
        digest = int.from_bytes(hashlib.blake2b(identity, digest_size=8).digest(), "little")
        own = torch.tensor([digest - (1 << 63)], device=vector.device)
        others = own.repeat(self.world_size)
        self._send_numbers([own] * self.world_size, others.split(1))
        if not bool((others == own).all()):
            raise PayloadError(self._differences(f"version {VERSION}, unit {unit.name!r}, {text}"))
        self._agreed.add(key)

    def _differences(self, text: str) -> str:
        ranks = defaultdict(list)
        for rank, other in enumerate(gather_bytes(text.encode(), self.group)):
            ranks[other.decode()].append(str(rank))
        settings = "; ".join(f"rank {', '.join(which)}: {what}" for what, which in ranks.items())
        return (
            f"ranks differ in what they send: {settings}: make codec, options, model, step and the "
            "version of shardlab the same on all ranks"
        )

    def _send_numbers(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Exchange a number of 8 bytes with every rank: an extra collective, and metadata."""
        account, begin = self.account, now(inputs[0].device)
        self.transport.all_to_all(inputs, outputs)
        account.add_time("extra_collective_s", begin, inputs[0].device)
        nbytes = 8 * (self.world_size - 1)
        account.collectives += 1
        account.extra_collectives += 1
        account.bytes_wire += nbytes
        account.metadata_bytes += nbytes

    def _all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Exchange the messages of one collective."""
        if not self._extra:
            self.transport.all_to_all(inputs, outputs)
            return
        begin = now(inputs[0].device)
        self.transport.all_to_all(inputs, outputs)
        self.account.add_time("extra_collective_s", begin, inputs[0].device)

    def _count(self, raw: float, wire: float) -> None:
        account = self.account
        account.collectives += 1
        account.extra_collectives += self._extra
        account.bytes_raw += raw
        account.bytes_wire += wire

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

    def _audit(self, reduced: Tensor, vector: Tensor, scale: float) -> None:
        """While auditing, compare a reduction with the exact one, whose bytes are not counted.

        Args:
            reduced: this rank's shard of the sum.
            vector: input of this rank, [world_size * n].
        """
        if self.ledger.audit is None:
            return
        chunks, exact = self._chunks(vector), torch.empty_like(reduced)
        parts = [torch.empty_like(chunk) for chunk in chunks]
        parts[self.rank] = chunks[self.rank]
        self.transport.all_to_all(chunks, parts)
        add_up(parts, exact, scale)
        self.ledger.audit.add(reduced, exact)


class Native(Collective):
    """The process group's own collectives, uncompressed: no other operator is launched.

    A NaN or an infinity of any rank shows in the sums, and so in the norm of the gradient.
    On gloo a reduce-scatter is an all-reduce of the full vector of which each rank keeps its chunk,
    so twice the necessary bytes are sent; the ledger counts them. gloo's all-gather of long vectors
    uses half of a link's bandwidth: `Transport` replaces it, with the same bytes.
    """

    elementwise = True

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        op, rest = self._operation(vector, scale)
        wire = sum_scatter(output, vector, self.group, self.ledger.traffic, op)
        self._count(raw=self._share_of_others(vector.nbytes), wire=wire)
        if rest != 1:
            output.mul_(rest)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        op = self._scaled(vector, scale)
        with self.ledger.traffic.operation(self._count_all_reduce(vector), vector.device):
            dist.all_reduce(vector, op, group=self.group)

    @labelled
    def start_all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> dist.Work:
        """Start the all-reduce; the backend completes it concurrently with computation."""
        op = self._scaled(vector, scale)
        nbytes = self._count_all_reduce(vector)
        start = partial(dist.all_reduce, vector, op, group=self.group, async_op=True)

        def done(ended: torch.futures.Future[object]) -> list[Tensor]:
            ended.value()  # raises the error of the operation
            return [vector]

        return FutureWork(self.ledger.traffic.ending(start, nbytes, vector.device).then(done))

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        nbytes = self._count_all_gather(output)
        if dist.get_backend(self.group) == "gloo":
            self.transport.all_to_all(*self.transport.gathering(shard, self._chunks(output)))
            return
        with self.ledger.traffic.operation(nbytes, output.device):
            dist.all_gather_single(output, shard, group=self.group)

    @labelled
    def start_all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> dist.Work:
        """Start the all-gather; on gloo `wait()` sends most of it."""
        nbytes = self._count_all_gather(output)
        if dist.get_backend(self.group) == "gloo":
            return self.transport.start_gather(shard, self._chunks(output))
        start = partial(dist.all_gather_single, output, shard, group=self.group, async_op=True)
        return self.ledger.traffic.awaited(start, nbytes, output.device)

    def _operation(self, vector: Tensor, scale: float) -> tuple[dist.ReduceOp.RedOpType, float]:
        """Return the operation of the group, and the factor that is left to multiply by."""
        if scale == 1 / self.world_size and divides(self.group, vector.device):
            return dist.ReduceOp.AVG, 1.0
        return dist.ReduceOp.SUM, scale

    def _scaled(self, vector: Tensor, scale: float) -> dist.ReduceOp.RedOpType:
        """Return the operation of the group, having multiplied by the factor that is left."""
        op, rest = self._operation(vector, scale)
        if rest != 1:
            vector.mul_(rest)
        return op

    def _count_all_gather(self, output: Tensor) -> float:
        """Count an all-gather; return the bytes that it sends."""
        needed = self._share_of_others(output.nbytes)
        self._count(raw=needed, wire=needed)
        return needed

    def _count_all_reduce(self, vector: Tensor) -> float:
        """Count an all-reduce; return the bytes that it sends."""
        needed = 2 * self._share_of_others(vector.nbytes)
        self._count(raw=needed, wire=needed)
        return needed


class UncompressedAllToAll(Collective):
    """Uncompressed collectives by all-to-all: the owner of a chunk sums what it receives.

    The `exchange` route of codec `none`; on gloo half of the bytes of its own reduce-scatter.
    """

    def __init__(
        self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind, extra: bool = False
    ) -> None:
        super().__init__(group, ledger, kind, extra)
        self._buffers = Buffers()

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        self._agree(unit, vector, f"none ({vector.dtype})")
        chunks = self._chunks(vector)
        buffer = self._buffers.bytes("received", vector.nbytes, vector.device)
        received = list(self._chunks(buffer.view(vector.dtype)))
        received[self.rank] = chunks[self.rank]
        self._all_to_all(chunks, received)
        add_up(received, output, scale)
        self._count_vector(vector)
        self._audit(output, vector, scale)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather."""
        padded = self._padded(vector)
        shard = padded.new_empty(padded.numel() // self.world_size)
        self.reduce_scatter(shard, padded, scale, unit)
        self.all_gather(padded, shard, unit)
        if padded is not vector:
            vector.copy_(padded[: vector.numel()])

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        self._agree(unit, output, f"none ({output.dtype})")
        self._all_to_all(*self.transport.gathering(shard, self._chunks(output)))
        self._count_vector(output)

    def _count_vector(self, vector: Tensor) -> None:
        """Count a vector [world_size * n] of which every rank sends or receives W - 1 parts."""
        needed = self._share_of_others(vector.nbytes)
        elements = vector.numel() // self.world_size * (self.world_size - 1)
        self._count(raw=needed, wire=needed)
        self.account.elements += elements
        self.account.elements_sent += elements


def uncompressed(
    group: dist.ProcessGroup, ledger: Ledger, kind: Kind, extra: bool = False
) -> Collective:
    """Return collectives of exact sums: gloo's own reduce-scatter sends twice what is needed."""
    by_all_to_all = dist.get_backend(group) == "gloo"
    return (UncompressedAllToAll if by_all_to_all else Native)(group, ledger, kind, extra)


def divides(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group divides sums on their way: NCCL does, without an operator of ours.

    gloo's mean has other bits than a sum that is multiplied.
    """
    # a group may have a backend for each type of device
    return device.type == "cuda" and "nccl" in dist.get_backend_config(group)


def sum_scatter(
    output: Tensor,
    vector: Tensor,
    group: dist.ProcessGroup,
    traffic: Traffic,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> float:
    """Reduce-scatter by the group's own collective; return the bytes that this rank sent."""
    world_size = dist.get_world_size(group)
    times = 2 if dist.get_backend(group) == "gloo" else 1
    wire = times * vector.nbytes * (world_size - 1) / world_size
    with traffic.operation(wire, vector.device):
        dist.reduce_scatter_single(output, vector, op=op, group=group)
    return wire


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


MakeCollective = Callable[[dist.ProcessGroup], Collective]


class Attachable(ABC):
    """Module whose collectives `attach` can replace without an import of its class."""

    @abstractmethod
    def attach_collectives(
        self, gradients: MakeCollective, weights: MakeCollective, replicas: MakeCollective
    ) -> Callable[[], None]:
        """Use these collectives for the module's process groups; return a function that undoes it.

        Args:
            replicas: of gradients, between replicas of the model.
        """

    @abstractmethod
    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each unit, which is sent as one flat vector."""
