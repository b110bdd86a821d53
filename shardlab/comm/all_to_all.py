"""Collectives over any codec: all-to-all of payloads, or sums of payloads on the wire.

In the all-to-all the owner of a chunk decodes and sums what it receives: one quantization per value
and float32 sums, so the error does not grow with the number of ranks (qgZ of ZeRO++, Wang et al.
2023, section 3.3; SDP4Bit, Jia et al. 2024). With two levels nodes exchange only their sums, 1/L of
the vector for each of their L ranks, and every value is quantized twice.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey, Unit
from shardlab.codecs.identity import Identity
from shardlab.codecs.wire import Buffers, describe
from shardlab.comm.codec_collective import DEFAULT, CodecCollective, CodecSettings
from shardlab.comm.collective import add_up
from shardlab.comm.feedback import ACROSS
from shardlab.comm.ledger import Kind, Ledger
from shardlab.comm.object_collectives import subgroup
from shardlab.comm.uncompressed import sum_scatter
from shardlab.core.device import now
from shardlab.core.errors import UserError


class AllToAllCollective(CodecCollective):
    """All-to-all of payloads.

    Raises:
        ValueError: the class needs a linear codec, whose payloads can be summed.
        PayloadError: (all collectives) the ranks differ in what they send.
    """

    linear_only: ClassVar[bool] = False
    """whether payloads are summed on the wire"""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        codec: Codec,
        settings: CodecSettings = DEFAULT,
        extra: bool = False,
    ) -> None:
        if self.linear_only and not codec.linear:
            raise ValueError(f"codec {codec.name!r} cannot be summed on the wire")
        super().__init__(group, ledger, kind, settings, extra)
        self.codec = codec
        self._has_codec = not isinstance(codec, Identity)
        self._name = describe(codec)
        self._steps: dict[str, int] = {}
        self._buffers = Buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of messages of each unit, from which random codecs continue."""
        steps = {unit: torch.tensor(step) for unit, step in self._steps.items()}
        return steps | super().state_dict()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        super().load_state_dict(state)
        warmup = super().state_dict()
        self._steps = {unit: int(step) for unit, step in state.items() if unit not in warmup}

    def _reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        if not self._compresses(vector.numel()):
            self._exact.reduce_scatter(output, vector, scale, unit)
            return
        step = self._begin(vector, unit)
        payloads = self._scatter(vector, unit, step)
        part = f"{unit.name}>{self.rank}"
        keys = [MessageKey(self._seed, step, part, rank) for rank in range(self.world_size)]
        begin = now(vector.device)
        self.codec.decode_sum(payloads, output, scale, keys)
        self.account.add_time("decode_s", begin, vector.device)
        self._check_finite(output)
        self._audit(output, vector, scale)

    def _all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather the owners' sums; each has its own residual.

        Payloads that can be summed are encoded once: the owners gather the summed payloads.
        """
        n = vector.numel()
        if not self._compresses(n + -n % self.world_size):
            self._exact.all_reduce(vector, scale, unit)
        elif self.codec.linear:
            padded = self._padded(vector)
            self._sum_payloads(padded, scale, unit)
            if padded is not vector:
                vector.copy_(padded[:n])
        else:
            super()._all_reduce(vector, scale, unit)

    def _all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Gather decoded payloads; the owner decodes its own, so all ranks hold the same values."""
        if not self._compresses(output.numel()):
            self._exact.all_gather(output, shard, unit)
            return
        step = self._begin(output, unit)
        part, n = f"{unit.name}<", shard.numel()
        (payload,) = self._encode([shard], [part], step)
        payloads = self._exchange([payload] * self.world_size, n)
        begin = now(output.device)
        for rank, chunk in enumerate(self._chunks(output)):
            key = MessageKey(self._seed, step, part, rank)
            self.codec.decode_sum([payloads[rank]], chunk, 1.0, [key])
        self.account.add_time("decode_s", begin, output.device)
        self._count(raw=self._share_of_others(output.nbytes), wire=0.0)
        self._count_sent(n, payload, self.world_size - 1)

    def _compresses(self, n: int) -> bool:
        return self._has_codec and not self._is_short(n)

    def _begin(self, vector: Tensor, unit: Unit) -> int:
        """Return the step of this message of the unit, on which all ranks agree at first."""
        if self._updates is None:
            step = self._steps.get(unit.name, 0)
            self._steps[unit.name] = step + 1
        else:
            step = self._updates.count
        if (unit.name, vector.numel(), self._name) not in self._agreed:
            self._agree(unit, vector, self._name, step)
        return step

    def _scatter(self, vector: Tensor, unit: Unit, step: int) -> Sequence[Tensor]:
        """Send chunk i to rank i, encoded; return the payloads of this rank's chunk."""
        chunks = self._chunks(vector)
        n = chunks[0].numel()
        parts = [f"{unit.name}>{to}" for to in range(self.world_size)]
        payloads = self._encode(chunks, parts, step)
        received = self._exchange(payloads, n)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        if not self.codec.variable:
            self._count_sent(n, payloads[0], self.world_size - 1)
        else:
            for to, payload in enumerate(payloads):
                if to != self.rank:
                    self._count_sent(n, payload, 1)
        return received

    def _encode(
        self, vectors: Sequence[Tensor], parts: Sequence[str], step: int
    ) -> Sequence[Tensor]:
        """Return the payloads of vectors of equal length; part i names vector i."""
        device = vectors[0].device
        bounds = [self.codec.payload_bytes(vectors[0].numel())] * len(vectors)
        buffers = self._buffers.messages("sent", bounds, device)
        begin = now(device)
        payloads = []
        for vector, part, buffer in zip(vectors, parts, buffers, strict=True):
            key = MessageKey(self._seed, step, part, self.rank)
            if self.feedback is None:
                payloads.append(self.codec.encode(vector, key, buffer))
            else:
                payloads.append(self.feedback.encode(self.codec, vector, part, key, buffer))
        self.account.add_time("encode_s", begin, device)
        return payloads

    def _exchange(self, payloads: Sequence[Tensor], n: int) -> Sequence[Tensor]:
        """Send payload i to rank i; return the payloads of all ranks, in rank order."""
        if self.codec.variable and self.world_size > 1:
            sizes = self._exchange_sizes(payloads)
        else:
            sizes = [payload.numel() for payload in payloads]
        received = self._buffers.messages("received", sizes, payloads[0].device)
        received[self.rank] = payloads[self.rank]
        self._all_to_all(payloads, received)
        return received

    def _exchange_sizes(self, payloads: Sequence[Tensor]) -> list[int]:
        outgoing = torch.tensor([p.numel() for p in payloads], device=payloads[0].device)
        incoming = outgoing.clone()
        self._send_numbers(outgoing.split(1), incoming.split(1))
        sizes: list[int] = incoming.tolist()
        return sizes

    def _sum_payloads(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """All-reduce payloads of a linear codec, which the owners sum."""
        step = self._begin(vector, unit)
        payloads = self._scatter(vector, unit, step)
        n = vector.numel() // self.world_size
        total = self._buffers.floats("summed", payloads[0].numel() // 4, vector.device)
        add_up([payload.view(torch.float32) for payload in payloads], total, 1.0)
        summed = total.view(torch.uint8)
        sums = self._exchange([summed] * self.world_size, n)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        self._count_sent(n, summed, self.world_size - 1)
        self._decode_sums(vector, sums, scale, unit, step)

    def _decode_sums(
        self, vector: Tensor, sums: Sequence[Tensor], scale: float, unit: Unit, step: int
    ) -> None:
        """Set chunk i of `vector` to scale * the decoded sum of payloads i."""
        # the audit needs the values that are overwritten here
        exact = vector if self.ledger.audit is None else vector.clone()
        chunks, begin = self._chunks(vector), now(vector.device)
        for owner, (chunk, payload) in enumerate(zip(chunks, sums, strict=True)):
            key = MessageKey(self._seed, step, f"{unit.name}>{owner}", owner)
            self.codec.decode_sum([payload], chunk, scale, [key])
        self.account.add_time("decode_s", begin, vector.device)
        self._check_finite(vector)
        self._audit(chunks[self.rank], exact, scale)

    def _check_finite(self, reduced: Tensor) -> None:
        """Count a result of decoded payloads with a NaN or an infinity."""
        # on a CPU a sum takes a third of the time of a norm, but that of finite elements may
        # overflow; on a GPU the host would wait for it
        if reduced.device.type == "cpu" and math.isfinite(reduced.sum().item()):
            return
        # the largest magnitude: NaN with a NaN; nothing overflows and no temporary is needed
        largest = torch.linalg.vector_norm(reduced, math.inf)
        account = self.account
        if reduced.device.type == "cpu":
            account.not_finite += not math.isfinite(largest.item())
        else:
            account.not_finite = account.not_finite + ~largest.isfinite()

    def _count_sent(self, n: int, payload: Tensor, copies: int) -> None:
        """Count a payload of n elements sent to `copies` ranks."""
        account, content = self.account, self.codec.content(n, payload)
        account.bytes_wire += copies * payload.numel()
        account.elements += copies * n
        account.elements_sent += copies * content.elements
        account.index_bytes += copies * content.index_bytes
        account.metadata_bytes += copies * content.metadata_bytes


class LinearNative(AllToAllCollective):
    """The `native` route of linear codecs: the process group's own collectives sum the payloads.

    Payloads are viewed as float32. Reductions equal those of `AllToAllCollective` up to the order
    of sums; all_gather is inherited.
    """

    linear_only = True

    def _reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        if not self._compresses(vector.numel()):
            self._exact.reduce_scatter(output, vector, scale, unit)
            return
        step = self._begin(vector, unit)
        payloads, stride, size = self._encode_padded(vector, unit, step)
        total = self._buffers.floats("summed", stride // 4, vector.device)
        wire = sum_scatter(total, payloads, self.group, self.ledger.traffic)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        payload = total.view(torch.uint8)
        self._count_padded(output.numel(), payload, size, round(wire / stride))
        key = MessageKey(self._seed, step, f"{unit.name}>{self.rank}", self.rank)
        begin = now(vector.device)
        self.codec.decode_sum([payload[:size]], output, scale, [key])
        self.account.add_time("decode_s", begin, vector.device)
        self._check_finite(output)
        self._audit(output, vector, scale)

    def _sum_payloads(self, vector: Tensor, scale: float, unit: Unit) -> None:
        step = self._begin(vector, unit)
        payloads, stride, size = self._encode_padded(vector, unit, step)
        copies = 2 * (self.world_size - 1)
        with self.ledger.traffic.operation(copies * stride, vector.device):
            dist.all_reduce(payloads, group=self.group)
        self._count(raw=2 * self._share_of_others(vector.nbytes), wire=0.0)
        sums = [chunk.view(torch.uint8) for chunk in self._chunks(payloads)]
        self._count_padded(vector.numel() // self.world_size, sums[0], size, copies)
        self._decode_sums(vector, [chunk[:size] for chunk in sums], scale, unit, step)

    def _encode_padded(self, vector: Tensor, unit: Unit, step: int) -> tuple[Tensor, int, int]:
        """Return the payloads of all chunks as one float32 vector, the bytes of each in it, and of
        each alone: it is padded with zeros to a multiple of 8 bytes.
        """
        chunks = self._chunks(vector)
        parts = [f"{unit.name}>{to}" for to in range(self.world_size)]
        payloads = self._encode(chunks, parts, step)
        size = payloads[0].numel()
        stride = size + -size % 8
        buffer = self._buffers.bytes("padded", stride * len(chunks), vector.device)
        for payload, slot in zip(payloads, self._chunks(buffer), strict=True):
            slot[:size].copy_(payload)
            slot[size:].zero_()
        return buffer.view(torch.float32), stride, size

    def _count_padded(self, n: int, padded: Tensor, size: int, copies: int) -> None:
        """Count payloads of n elements and their padding."""
        self._count_sent(n, padded[:size], copies)
        padding = copies * (padded.numel() - size)
        self.account.bytes_wire += padding
        self.account.metadata_bytes += padding


class HierarchicalCollective(CodecCollective):
    """All-to-all inside nodes of L ranks, then between the N nodes; rank = L * node + local rank.

    One codec inside a node, another one between nodes: the reduce-scatter of ZeRO++ (Wang et al.
    2023, section 3.3) and SDP4Bit (Jia et al. 2024). The ledger counts the messages of both levels;
    `bytes_between_nodes` those of the second alone.

    Args:
        inside, between: the codecs of the two levels.
        ranks_per_node: L; the ranks of a node follow one another.

    Raises:
        UserError: the ranks are not whole nodes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        inside: Codec,
        between: Codec,
        ranks_per_node: int,
        settings: CodecSettings = DEFAULT,
    ) -> None:
        super().__init__(group, ledger, kind, settings)
        if self.world_size % ranks_per_node:
            raise UserError(
                f"ranks_per_node: {self.world_size} ranks are not whole nodes of {ranks_per_node}: "
                "choose a divisor"
            )
        self.ranks_per_node = ranks_per_node
        self.nodes = self.world_size // ranks_per_node
        node, local_rank = divmod(self.rank, ranks_per_node)
        ranks = dist.get_process_group_ranks(group)
        of_node = ranks[node * ranks_per_node : (node + 1) * ranks_per_node]
        # every rank creates its node's group first: groups are created in one order on all ranks
        groups = [subgroup(group, each) for each in (of_node, ranks[local_rank::ranks_per_node])]
        levels = settings._replace(excluded=frozenset(), warmup=0)
        self.inside = AllToAllCollective(groups[0], ledger, kind, inside, levels)
        self.between = AllToAllCollective(groups[1], ledger, kind, between, levels, extra=True)
        self._buffers = Buffers()

    def state_dict(self) -> dict[str, Tensor]:  # noqa: D102
        return {**self.inside.state_dict(), **self.between.state_dict(), **super().state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        super().load_state_dict(state)
        levels = {name: step for name, step in state.items() if name not in super().state_dict()}
        across = {name: step for name, step in levels.items() if name.endswith(ACROSS)}
        self.between.load_state_dict(across)
        self.inside.load_state_dict({n: step for n, step in levels.items() if n not in across})

    def _reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:
        """Sum inside the node the chunks for its local rank in every node, then between nodes."""
        n = output.numel()
        by_node = vector.view(self.nodes, self.ranks_per_node, n)
        by_local_rank = self._buffer("sent", vector).view(self.ranks_per_node, self.nodes, n)
        by_local_rank.copy_(by_node.transpose(0, 1))
        of_node = self._buffer("of the node", vector, self.nodes * n)
        # the audit compares both levels with the exact sum, not one level with its inputs
        audit, self.ledger.audit = self.ledger.audit, None
        try:
            self.inside._reduce_scatter(of_node, by_local_rank.view(-1), 1.0, _inside(unit))
            before = self.account.bytes_wire
            self.between._reduce_scatter(output, of_node, scale, _across(unit))
            self.account.bytes_between_nodes += self.account.bytes_wire - before
        finally:
            self.ledger.audit = audit
        self._audit(output, vector, scale)

    def _all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Gather between nodes first, so that every shard is sent to each other node once."""
        n = shard.numel()
        gathered = self._buffer("of the local rank", output, self.nodes * n)
        before = self.account.bytes_wire
        self.between._all_gather(gathered, shard, _across(unit))
        self.account.bytes_between_nodes += self.account.bytes_wire - before
        received = self._buffer("received", output)
        self.inside._all_gather(received, gathered, _inside(unit))
        by_node = output.view(self.nodes, self.ranks_per_node, n)
        by_node.copy_(received.view(self.ranks_per_node, self.nodes, n).transpose(0, 1))

    def _buffer(self, purpose: str, like: Tensor, n: int | None = None) -> Tensor:
        size = (like.numel() if n is None else n) * like.element_size()
        return self._buffers.bytes(purpose, size, like.device).view(like.dtype)


def _inside(unit: Unit) -> Unit:
    """Return the unit without blocks: chunks have another order inside a node."""
    return Unit(unit.name)


def _across(unit: Unit) -> Unit:
    """Return the unit of the second level, which has residuals and steps under this name."""
    return Unit(unit.name + ACROSS)
