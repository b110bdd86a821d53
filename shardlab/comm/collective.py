"""The contract of a collective, and its trivial implementation: the process group's own."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from shardlab.codecs.unit import Unit
from shardlab.comm.ledger import Account, Kind, Ledger
from shardlab.profiling.traces.labels import COMMUNICATION
from shardlab.transport.traffic import Traffic
from shardlab.transport.transport import Transport

_Method = TypeVar("_Method", bound=Callable[..., Any])


def labelled(method: _Method) -> _Method:
    """In profiles, what the method moves carries the name of its unit, its last argument."""

    @wraps(method)
    def call(*args: Any) -> Any:
        with record_function(COMMUNICATION + args[-1].name):
            return method(*args)

    return cast(_Method, call)


class Collective(ABC):
    """reduce-scatter, all-reduce and all-gather of float vectors over one process group.

    Laws:
    - every rank ends with the same bytes wherever the mathematics says "the same vector";
    - what moves is in the ledger, under `kind`, in bytes that this rank sends to others;
    - a message belongs to a `unit`, which is the same on all ranks and in all steps;
    - profiles show whose unit's values move, where a method is `labelled`.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, kind: Kind) -> None:
        self.group = group
        self.ledger = ledger
        self.kind = kind
        self.transport = Transport(group, ledger.traffic)
        self.world_size = self.transport.world_size
        self.rank = self.transport.rank

    @property
    def account(self) -> Account:
        """Where the messages of this collective are counted."""
        return self.ledger.accounts[self.kind]

    @abstractmethod
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """output[n] = scale * sum over ranks of chunk `rank` of vector[world_size * n]."""

    @abstractmethod
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """vector[n] = scale * sum over ranks of vector, in place."""

    @abstractmethod
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """output[world_size * n] = the shards[n] of all ranks, one after the other.

        `shard` may be this rank's part of `output`.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What the next messages depend on beside their vectors, the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Continues from `state_dict()`."""

    def _count(self, raw: float, wire: float, collectives: int = 1) -> None:
        account = self.account
        account.collectives += collectives
        account.bytes_raw += raw
        account.bytes_wire += wire

    def _share_of_others(self, nbytes: int) -> float:
        """(W-1)/W of a full vector: what a reduce-scatter or all-gather has to send per rank."""
        return nbytes * (self.world_size - 1) / self.world_size

    def _chunks(self, vector: Tensor) -> list[Tensor]:
        """The W equal parts of a vector."""
        return list(vector.view(self.world_size, vector.numel() // self.world_size).unbind())

    def _check_finite(self, reduced: Tensor) -> None:
        """Counts a result with a NaN or an infinity."""
        # every such element shows in the sum, which may also overflow by itself
        if not math.isfinite(float(reduced.sum())) and not bool(reduced.isfinite().all()):
            self.account.not_finite += 1

    def _audit(self, reduced: Tensor, vector: Tensor, scale: float) -> None:
        """While auditing: compares a reduction with the exact one, which is counted nowhere.

        Args:
            reduced: this rank's shard of the sum.
            vector: what this rank gave, [world_size * n].
        """
        if self.ledger.audit is None:
            return
        chunks, exact = self._chunks(vector), torch.empty_like(reduced)
        parts = [torch.empty_like(chunk) for chunk in chunks]
        parts[self.rank] = chunks[self.rank]
        self.transport.exchange(chunks, parts)
        add_up(parts, exact, scale)
        self.ledger.audit.add(reduced, exact)


class Native(Collective):
    """The process group's own collectives, uncompressed.

    On gloo a reduce-scatter is an all-reduce of the full vector of which each rank keeps its part,
    so twice the necessary bytes move; the ledger counts them. gloo's all-gather of long vectors
    uses half of a link, so `Transport` does it there, with the same bytes.
    """

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        wire = sum_scatter(output, vector, self.group, self.ledger.traffic)
        self._count(raw=self._share_of_others(vector.nbytes), wire=wire)
        if scale != 1:
            output.mul_(scale)
        self._check_finite(output)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        if scale != 1:
            vector.mul_(scale)
        with self.ledger.traffic.operation(self._count_all_reduce(vector)):
            dist.all_reduce(vector, group=self.group)
        self._check_finite(vector)

    @labelled
    def start_mean(self, vector: Tensor, unit: Unit) -> torch.futures.Future[Tensor]:
        """Starts the mean over ranks, in place, and returns at once."""
        vector.mul_(1 / self.world_size)
        nbytes = self._count_all_reduce(vector)
        start = partial(dist.all_reduce, vector, group=self.group, async_op=True)

        def done(ended: torch.futures.Future[object]) -> Tensor:
            ended.value()  # raises what went wrong
            self._check_finite(vector)
            return vector

        return self.ledger.traffic.ending(start, nbytes).then(done)

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        if self._gathers_in_pieces(output):
            self.transport.gather(shard, self._chunks(output))
        else:
            dist.all_gather_single(output, shard, group=self.group)

    @labelled
    def start_all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> dist.Work:
        """Starts the gathering and returns at once."""
        if self._gathers_in_pieces(output):
            return self.transport.start_gather(shard, self._chunks(output))
        return dist.all_gather_single(output, shard, group=self.group, async_op=True)

    def _gathers_in_pieces(self, output: Tensor) -> bool:
        """Counts a gathering, and says who is to do it."""
        needed = self._share_of_others(output.nbytes)
        self._count(raw=needed, wire=needed)
        return dist.get_backend(self.group) == "gloo"

    def _count_all_reduce(self, vector: Tensor) -> float:
        """Returns the bytes that it sends."""
        needed = 2 * self._share_of_others(vector.nbytes)
        self._count(raw=needed, wire=needed)
        return needed


def sum_scatter(
    output: Tensor, vector: Tensor, group: dist.ProcessGroup, traffic: Traffic
) -> float:
    """The group's own reduce-scatter by sum; returns the bytes that this rank sent."""
    world_size = dist.get_world_size(group)
    times = 2 if dist.get_backend(group) == "gloo" else 1
    wire = times * vector.nbytes * (world_size - 1) / world_size
    with traffic.operation(wire):
        dist.reduce_scatter_single(output, vector, op=dist.ReduceOp.SUM, group=group)
    return wire


def add_up(parts: Sequence[Tensor], out: Tensor, scale: float) -> None:
    """out = scale * (part 0 + part 1 + ...), in this order and in float32 whatever the dtype."""
    if out.dtype != torch.float32:
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
