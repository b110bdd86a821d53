"""Uncompressed collectives: those of the process group, and all-to-all with local sums."""

from functools import cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Unit
from shardlab.codecs.wire import Buffers
from shardlab.comm.collective import Collective, add_up, labelled
from shardlab.comm.ledger import Ledger, MessageKind
from shardlab.comm.transport import Traffic
from shardlab.core import torch_private


class Native(Collective):
    """The process group's own collectives, uncompressed: no other operator is launched.

    A NaN or an infinity of any rank shows in the sums, and so in the norm of the gradient.
    On gloo a reduce-scatter is an all-reduce of the full vector of which each rank keeps its chunk,
    so twice the necessary bytes are sent; the ledger counts them. gloo's all-gather of long vectors
    uses half of a link's bandwidth: `Transport` replaces it, with the same bytes.
    """

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        op, rest = self._operation(vector, scale)
        wire = sum_scatter(output, vector, self.group, self.ledger.traffic, op)
        raw = self._share_of_others(vector.nbytes)
        self._count(raw, wire, summed_in(vector.dtype), ring=True)
        if rest != 1:
            output.mul_(rest)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        op = self._scaled(vector, scale)
        nbytes = self._count_all_reduce(vector)
        added = None if self.watch is None else vector.clone()
        with self.ledger.traffic.operation(nbytes, vector.device, self.group):
            dist.all_reduce(vector, op, group=self.group)
        if self.watch is not None and added is not None:
            self.watch(added / self.world_size if op == dist.ReduceOp.AVG else added, vector)

    @labelled
    def start_all_reduce(
        self, vector: Tensor, scale: float, unit: Unit
    ) -> torch.futures.Future[Tensor]:
        """Start the all-reduce, concurrent with computation; return a future of the vector.

        Until it is complete callers must not use the vector. Bits and counts are those of
        `all_reduce`.
        """
        op = self._scaled(vector, scale)
        nbytes = self._count_all_reduce(vector)
        start = partial(dist.all_reduce, vector, op, group=self.group, async_op=True)

        def done(ended: torch.futures.Future[object]) -> Tensor:
            ended.value()  # raises the error of the operation
            return vector

        _, ended = self.ledger.traffic.ending(start, nbytes, vector.device, self.group)
        return ended.then(done)

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:  # noqa: D102
        nbytes = self._count_all_gather(output)
        if dist.get_backend(self.group) == "gloo":
            self.transport.all_to_all(*self.transport.gathering(shard, self._chunks(output)))
            return
        with self.ledger.traffic.operation(nbytes, output.device, self.group):
            torch_private.all_gather_single(output, shard, group=self.group)

    @labelled
    def start_all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> dist.Work | None:
        """Start the all-gather; None if it is complete, as on gloo."""
        if dist.get_backend(self.group) == "gloo":
            self.all_gather(output, shard, unit)
            return None
        nbytes = self._count_all_gather(output)
        gather = torch_private.all_gather_single
        start = partial(gather, output, shard, group=self.group, async_op=True)
        work, _ = self.ledger.traffic.ending(start, nbytes, output.device, self.group)
        return work

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
        # gloo's own is not used
        is_ring = dist.get_backend(self.group) != "gloo"
        self._count(needed, needed, name_of(output.dtype), is_ring)
        return needed

    def _count_all_reduce(self, vector: Tensor) -> float:
        """Count an all-reduce; return the bytes that it sends."""
        needed = 2 * self._share_of_others(vector.nbytes)
        self._count(needed, needed, summed_in(vector.dtype), ring=True)
        return needed


class UncompressedAllToAll(Collective):
    """Uncompressed collectives by all-to-all: the owner of a chunk sums what it receives.

    The `exchange` route of codec `none`; on gloo half of the bytes of its own reduce-scatter.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: MessageKind,
        extra: bool = False,
        audited: bool = True,
    ) -> None:
        super().__init__(group, ledger, kind, extra, audited)
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
        wide = vector.dtype if vector.element_size() >= 4 else torch.float32
        self._count_vector(vector, summed_in(vector.dtype, wide))
        self._compare_exactly(output, vector, scale)

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
        self._count_vector(output, name_of(output.dtype))

    def _count_vector(self, vector: Tensor, format: str) -> None:
        """Count a vector [world_size * n] of which every rank sends or receives W - 1 parts."""
        needed = self._share_of_others(vector.nbytes)
        elements = vector.numel() // self.world_size * (self.world_size - 1)
        self._count(needed, needed, format)
        self.account.elements += elements
        self.account.elements_sent += elements


def uncompressed(
    group: dist.ProcessGroup,
    ledger: Ledger,
    kind: MessageKind,
    extra: bool = False,
    audited: bool = True,
) -> Collective:
    """Return collectives of exact sums: gloo's own reduce-scatter sends twice what is needed."""
    by_all_to_all = dist.get_backend(group) == "gloo"
    return (UncompressedAllToAll if by_all_to_all else Native)(group, ledger, kind, extra, audited)


def divides(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group divides sums on their way: NCCL does, without an operator of ours.

    gloo's mean has other bits than a sum that is multiplied.
    """
    # a group may have a backend for each type of device
    return device.type == "cuda" and "nccl" in dist.get_backend_config(group)


@cache  # of every message
def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the ledger."""
    return str(dtype).removeprefix("torch.")


@cache
def summed_in(sent: torch.dtype, summed: torch.dtype | None = None) -> str:
    """Return what the ledger says of messages of one dtype that are summed in another, or in it."""
    return f"{name_of(sent)}, summed in {name_of(summed or sent)}"


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
    with traffic.operation(wire, vector.device, group):
        torch_private.reduce_scatter_single(output, vector, op=op, group=group)
    return wire
