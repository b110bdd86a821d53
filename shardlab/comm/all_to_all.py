"""Collectives over any codec by all-to-all of payloads.

The owner of a chunk decodes and sums what it receives: one quantization per value and float32 sums,
so the error does not grow with the number of ranks (qgZ of ZeRO++, Wang et al. 2023, section 3.3;
SDP4Bit, Jia et al. 2024). With two levels nodes exchange only their sums, 1/L of the vector for
each of their L ranks, and every value is quantized twice.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey, Unit
from shardlab.codecs.wire import Buffers
from shardlab.comm.codec_collective import CodecCollective, Route
from shardlab.comm.collective import add_up
from shardlab.comm.feedback import ACROSS
from shardlab.comm.ledger import Ledger, MessageKind
from shardlab.comm.object_collectives import release, subgroup
from shardlab.core.device import now
from shardlab.core.errors import UserError
from shardlab.strategy.codec_table import CODECS


class AllToAllCollective(CodecCollective):
    """All-to-all of payloads.

    Raises:
        PayloadError: (all collectives) the ranks differ in what they send.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: MessageKind,
        route: Route,
        extra: bool = False,
        audited: bool = True,
    ) -> None:
        super().__init__(group, ledger, kind, route, extra, audited)
        assert isinstance(route.method, Codec), "a method of several phases has its own collective"
        self.codec = route.method
        spec = CODECS.get(self.codec.name)
        is_sum = spec is None or not spec.votes
        self._summed = self.codec.name + ", summed in float32" * is_sum
        """format of a reduction in the ledger"""
        self._buffers = Buffers()

    def _reduce_scatter(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, step: int
    ) -> None:
        payloads = self._scatter(vector, unit, step)
        part, device = f"{unit.name}>{self.rank}", vector.device
        keys = [MessageKey(self.route.seed, step, part, rank) for rank in range(self.world_size)]
        begin = now(device)
        self.codec.decode_sum(payloads, output, scale, keys)
        self.account.add_time("decode_s", begin, device)
        self._check_finite(output)
        if self.watch is not None:
            added = self.codec.decode(payloads[self.rank], output.numel(), keys[self.rank])
            self.watch(added.mul_(scale), output)

    def _all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather the owners' sums; each has its own residual.

        Payloads that can be summed are encoded once: the owners gather the summed payloads.

        Raises:
            UserError: the gather would send other elements than were summed.
        """
        if self.codec.random_elements and not self.codec.linear:
            raise UserError(
                f"codec {self.codec.name!r}: an all-reduce would draw the elements twice, and keep "
                "few of those it summed: set values: fp32, or shard the gradients"
            )
        if not self.codec.linear:
            super()._all_reduce(vector, scale, unit)
            return
        padded = self._padded(vector)
        self._sum_payloads(padded, scale, unit, self._begin(unit, padded))
        if padded is not vector:
            vector.copy_(padded[: vector.numel()])

    def _all_gather(self, output: Tensor, shard: Tensor, unit: Unit, step: int) -> None:
        """Gather decoded payloads; the owner decodes its own, so all ranks hold the same values."""
        part = f"{unit.name}<"
        payloads = self._gather(self._encode([shard], [part], step)[0], output)
        self._decode_chunks(output, payloads, 1.0, [part] * self.world_size, step)

    def return_compressed(self, vector: Tensor, unit: Unit) -> None:  # noqa: D102
        feedback, chunks = self.route.feedback, self._chunks(self._padded(vector))
        assert feedback is not None, "there are residuals"
        for part, chunk in zip(self._parts_to_ranks(unit), chunks, strict=True):
            feedback.return_unapplied(part, chunk)

    def _scatter(self, vector: Tensor, unit: Unit, step: int) -> Sequence[Tensor]:
        """Send chunk i to rank i, encoded; return the payloads of this rank's chunk."""
        payloads = self._encode(self._chunks(vector), self._parts_to_ranks(unit), step)
        received = self._exchange(payloads)
        if self.codec.variable:
            sent = [payload for to, payload in enumerate(payloads) if to != self.rank]
            self._count_sent(vector, sent, 1, self._summed)
        else:
            self._count_sent(vector, payloads[:1], self.world_size - 1, self._summed)
        return received

    def _gather(self, payload: Tensor, vector: Tensor) -> Sequence[Tensor]:
        """Send the payload of 1/W of `vector` to all ranks; return the payloads of all ranks, in
        rank order."""
        payloads = self._exchange([payload] * self.world_size)
        self._count_sent(vector, [payload], self.world_size - 1, self.codec.name)
        return payloads

    def _parts_to_ranks(self, unit: Unit) -> list[str]:
        return [f"{unit.name}>{to}" for to in range(self.world_size)]

    def _encode(
        self, vectors: Sequence[Tensor], parts: Sequence[str], step: int
    ) -> Sequence[Tensor]:
        """Return the payloads of vectors of equal length; part i names vector i."""
        feedback, device = self.route.feedback, vectors[0].device
        bounds = [self.codec.payload_bytes(vectors[0].numel())] * len(vectors)
        buffers = self._buffers.messages("sent", bounds, device)
        begin = now(device)
        payloads = []
        for vector, part, buffer in zip(vectors, parts, buffers, strict=True):
            key = MessageKey(self.route.seed, step, part, self.rank)
            if feedback is None:
                payloads.append(self.codec.encode(vector, key, buffer))
            else:
                payloads.append(feedback.encode(self.codec, vector, part, key, buffer))
        self.account.add_time("encode_s", begin, device)
        return payloads

    def _exchange(self, payloads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Send payload i to rank i; return the payloads of all ranks, in rank order."""
        sizes = [payload.numel() for payload in payloads]
        device = payloads[0].device
        if self.codec.variable and self.world_size > 1:
            outgoing = torch.tensor(sizes, device=device)
            incoming = outgoing.clone()
            self._send_numbers(outgoing.split(1), incoming.split(1))
            sizes = incoming.tolist()
        received = self._buffers.messages("received", sizes, device)
        received[self.rank] = payloads[self.rank]
        self._all_to_all(payloads, received)
        return received

    def _sum_payloads(self, vector: Tensor, scale: float, unit: Unit, step: int) -> None:
        """All-reduce payloads of a linear codec, which the owners sum."""
        payloads = self._scatter(vector, unit, step)
        total = self._buffers.floats("summed", payloads[0].numel() // 4, vector.device)
        add_up([payload.view(torch.float32) for payload in payloads], total, 1.0)
        sums = self._gather(total.view(torch.uint8), vector)
        self._decode_chunks(vector, sums, scale, self._parts_to_ranks(unit), step)
        self._check_finite(vector)

    def _decode_chunks(
        self,
        vector: Tensor,
        payloads: Sequence[Tensor],
        scale: float,
        parts: Sequence[str],
        step: int,
    ) -> None:
        """Set chunk i of `vector` to scale * what payload i of rank i decodes to."""
        begin = now(vector.device)
        for rank, chunk in enumerate(self._chunks(vector)):
            key = MessageKey(self.route.seed, step, parts[rank], rank)
            self.codec.decode_sum([payloads[rank]], chunk, scale, [key])
        self.account.add_time("decode_s", begin, vector.device)

    def _check_finite(self, reduced: Tensor) -> None:
        """Count a result of decoded payloads with a NaN or an infinity."""
        # on a CPU a sum takes a third of the time of a norm, but that of finite elements may
        # overflow; on a GPU the host would wait for it
        if reduced.device.type == "cpu" and math.isfinite(reduced.sum().item()):
            return
        # nothing overflows in the largest magnitude, and no temporary is needed
        self.account.count_not_finite(torch.linalg.vector_norm(reduced, math.inf))

    def _count_sent(
        self, vector: Tensor, payloads: Sequence[Tensor], copies: int, format: str
    ) -> None:
        """Count a collective that sends payloads of 1/W of `vector`, each to `copies` ranks."""
        n, account = vector.numel() // self.world_size, self.account
        self._count(self._share_of_others(vector.nbytes), 0.0, None)
        for payload in payloads:
            content = self.codec.content(n, payload)
            account.add_sent(copies * payload.numel(), self._between_nodes.exchange, format)
            account.elements += copies * n
            account.elements_sent += copies * content.elements
            account.index_bytes += copies * content.index_bytes
            account.metadata_bytes += copies * content.metadata_bytes


class HierarchicalCollective(CodecCollective):
    """All-to-all inside nodes of L ranks, then between the N nodes; rank = L * node + local rank.

    One codec inside a node, another one between nodes: the reduce-scatter of ZeRO++ (Wang et al.
    2023, section 3.3) and SDP4Bit (Jia et al. 2024). The ledger counts the messages of both levels.

    Args:
        ledger: says L; the ranks of a node follow one another.
        route: with the codec between nodes.

    Raises:
        UserError: the ranks are not whole nodes.
    """

    def __init__(
        self, group: dist.ProcessGroup, ledger: Ledger, kind: MessageKind, route: Route
    ) -> None:
        super().__init__(group, ledger, kind, route)
        assert route.between_nodes is not None and ledger.ranks_per_node is not None, "two levels"
        self.ranks_per_node = size = ledger.ranks_per_node
        if self.world_size % size:
            raise UserError(
                f"ranks_per_node: {self.world_size} ranks are not whole nodes of {size}: "
                "choose a divisor"
            )
        self.nodes = self.world_size // size
        node, local_rank = divmod(self.rank, size)
        ranks = dist.get_process_group_ranks(group)
        of_node = ranks[node * size : (node + 1) * size]
        # every rank creates its node's group first: groups are created in one order on all ranks
        groups = [subgroup(group, members) for members in (of_node, ranks[local_rank::size])]
        self._made = groups
        inside = replace(route, between_nodes=None)
        across = replace(inside, method=route.between_nodes, warmup=0)
        # the audit compares both levels with the exact sum, not one level with its inputs
        self.inside = AllToAllCollective(groups[0], ledger, kind, inside, audited=False)
        self.between = AllToAllCollective(groups[1], ledger, kind, across, True, audited=False)
        # units have other names at the second level, so one counter, and one state, has all
        self.inside.steps = self.between.steps = self.steps
        self._buffers = Buffers()

    def _begin(self, unit: Unit, vector: Tensor) -> int:
        """Return 0: each level counts its messages, and its ranks compare them."""
        return 0

    def _reduce_scatter(
        self, output: Tensor, vector: Tensor, scale: float, unit: Unit, step: int
    ) -> None:
        """Sum inside the node the chunks for its local rank in every node, then between nodes."""
        n = output.numel()
        by_local_rank = self._by_local_rank(vector)
        of_node = self._buffer("of the node", vector, self.nodes * n)
        self.inside.reduce_compressed(of_node, by_local_rank, 1.0, _inside(unit), True)
        self.between.reduce_compressed(output, of_node, scale, _across(unit), True)

    def _all_gather(self, output: Tensor, shard: Tensor, unit: Unit, step: int) -> None:
        """Gather between nodes first, so that every shard is sent to each other node once."""
        n = shard.numel()
        gathered = self._buffer("of the local rank", output, self.nodes * n)
        self.between.gather_compressed(gathered, shard, _across(unit))
        received = self._buffer("received", output)
        self.inside.gather_compressed(received, gathered, _inside(unit))
        by_node = output.view(self.nodes, self.ranks_per_node, n)
        by_node.copy_(received.view(self.ranks_per_node, self.nodes, n).transpose(0, 1))

    def close(self) -> None:  # noqa: D102
        release(self._made)

    def return_compressed(self, vector: Tensor, unit: Unit) -> None:  # noqa: D102
        self.inside.return_compressed(self._by_local_rank(self._padded(vector)), _inside(unit))

    def _by_local_rank(self, vector: Tensor) -> Tensor:
        """Return the chunks of a vector by local rank, those of all its nodes after one another."""
        by_node = vector.view(self.nodes, self.ranks_per_node, -1)
        ordered = self._buffer("sent", vector)
        ordered.view(self.ranks_per_node, self.nodes, -1).copy_(by_node.transpose(0, 1))
        return ordered

    def _buffer(self, purpose: str, like: Tensor, n: int | None = None) -> Tensor:
        size = (like.numel() if n is None else n) * like.element_size()
        return self._buffers.bytes(purpose, size, like.device).view(like.dtype)


def _inside(unit: Unit) -> Unit:
    """Return the unit without blocks: chunks have another order inside a node."""
    return Unit(unit.name)


def _across(unit: Unit) -> Unit:
    """Return the unit of the second level, which has residuals and steps under this name."""
    return Unit(unit.name + ACROSS)
