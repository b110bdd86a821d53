"""Collectives over any codec: all-to-all of payloads, or sums of payloads on the wire.

In the all-to-all the owner of a chunk decodes and sums what it receives: one quantization per value
and float32 sums, so the error does not grow with the number of ranks (qgZ of ZeRO++, Wang et al.
2023, section 3.3; SDP4Bit, Jia et al. 2024).
"""

from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import HEADER, message_bytes, seal
from shardlab.comm.codec_collective import CodecCollective, Sealed
from shardlab.comm.collective import add_up, labelled
from shardlab.comm.native import Native, sum_scatter


class AllToAllCollective(CodecCollective):
    """All-to-all of payloads, each in an envelope.

    Vectors that the codec does not support, and all vectors of codec `none`, are sent uncompressed
    without an envelope or a copy; their owner sums what it receives.
    """

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        step = self._begin(vector, unit)
        if self._compresses(vector):
            payloads, part = self._scatter(vector, unit, step), f"{unit.name}>{self.rank}"
            keys = [self._key(part, step, rank) for rank in range(self.world_size)]
            with self._timed("decode_s", vector):
                self.codec.decode_sum(payloads, output, scale, keys)
            self._check_finite(output)
        else:
            chunks = self._chunks(vector)
            buffer = self._buffers.bytes("received", vector.nbytes, vector.device)
            received = self._chunks(buffer.view(vector.dtype))
            received[self.rank] = chunks[self.rank]
            self.transport.exchange(chunks, received)
            add_up(received, output, scale)
            self._count_uncompressed(vector)
        self._audit(output, vector, scale)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """Reduce-scatter, then all-gather the owners' sums; each has its own residual.

        Payloads that can be summed are encoded once: the owners gather the summed payloads.
        """
        n, size = vector.numel(), self.world_size
        padded = vector if n % size == 0 else torch.nn.functional.pad(vector, (0, -n % size))
        if self.codec.linear and self._compresses(padded):
            self._sum_linear(padded, scale, unit)
        else:
            self._sum(padded, scale, unit)
        if padded is not vector:
            vector.copy_(padded[:n])

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """Gather decoded payloads; the owner decodes its own, so all ranks hold the same values."""
        step = self._begin(output, unit)
        if not self._compresses(output):
            self.transport.gather(shard, self._chunks(output))
            self._count_uncompressed(output)
            return
        part, n = f"{unit.name}<", shard.numel()
        (sealed,) = self._seal([shard], [part], step)
        payloads = self._swap([sealed] * self.world_size, n, part, step)
        with self._timed("decode_s", output):
            for rank, chunk in enumerate(self._chunks(output)):
                self.codec.decode_sum([payloads[rank]], chunk, 1.0, [self._key(part, step, rank)])
        self._count(raw=self._share_of_others(output.nbytes), wire=0.0)
        self._count_sent(n, sealed, self.world_size - 1)

    def _scatter(self, vector: Tensor, unit: Unit, step: int) -> list[Tensor]:
        """Send chunk i to rank i, encoded; return the payloads of this rank's chunk."""
        parts = [f"{unit.name}>{to}" for to in range(self.world_size)]
        chunks = self._chunks(vector)
        sealed = self._seal(chunks, parts, step)
        n = chunks[0].numel()
        payloads = self._swap(sealed, n, parts[self.rank], step)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        for to, message in enumerate(sealed):
            if to != self.rank:
                self._count_sent(n, message, 1)
        return payloads

    def _sum(self, vector: Tensor, scale: float, unit: Unit) -> None:
        shard = vector.new_empty(vector.numel() // self.world_size)
        self.reduce_scatter(shard, vector, scale, unit)
        self.all_gather(vector, shard, unit)

    def _sum_linear(self, vector: Tensor, scale: float, unit: Unit) -> None:
        step = self._begin(vector, unit)
        payloads = self._scatter(vector, unit, step)
        n, part = vector.numel() // self.world_size, f"{unit.name}<"
        size = payloads[0].numel()
        (message,) = self._buffers.messages("summed", [message_bytes(size)], vector.device)
        payload = message[HEADER : HEADER + size]
        with self._timed("decode_s", vector):
            add_up([p.view(torch.float32) for p in payloads], payload.view(torch.float32), 1.0)
            sealed = Sealed(seal(message, size, self._contents(n, part, step)), payload)
        sums = self._swap([sealed] * self.world_size, n, part, step)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        self._count_sent(n, sealed, self.world_size - 1)
        self._decode_sums(vector, sums, scale, unit, step)

    def _decode_sums(
        self, vector: Tensor, sums: list[Tensor], scale: float, unit: Unit, step: int
    ) -> None:
        """Set chunk i of `vector` to scale * the decoded sum of payloads i."""
        # the audit needs the values that are overwritten here
        given = vector if self.ledger.audit is None else vector.clone()
        chunks = self._chunks(vector)
        with self._timed("decode_s", vector):
            for owner, (chunk, payload) in enumerate(zip(chunks, sums, strict=True)):
                key = self._key(f"{unit.name}>{owner}", step, owner)
                self.codec.decode_sum([payload], chunk, scale, [key])
        self._check_finite(vector)
        self._audit(chunks[self.rank], given, scale)

    def _count_uncompressed(self, vector: Tensor) -> None:
        """Count a vector [world_size * n] of which every rank sends or receives W - 1 parts."""
        needed = self._share_of_others(vector.nbytes)
        elements = vector.numel() // self.world_size * (self.world_size - 1)
        self._count(raw=needed, wire=needed)
        self.account.elements += elements
        self.account.elements_sent += elements


class LinearNative(AllToAllCollective):
    """The `native` route of linear codecs: the process group's own collectives sum the payloads.

    Payloads are viewed as float32 and have no envelope, since sums have no checksum. Reductions
    equal those of `AllToAllCollective` up to the order of sums; all_gather is inherited.
    """

    linear_only = True

    @cached_property
    def _native(self) -> Native:
        return Native(self.group, self.ledger, self.kind)

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        if not self._compresses(vector):
            self._report(vector)
            self._native.reduce_scatter(output, vector, scale, unit)
            return
        step = self._begin(vector, unit)
        payloads, first = self._encode_all(vector, unit, step)
        total = self._buffers.floats("summed", payloads.numel() // self.world_size, vector.device)
        wire = sum_scatter(total, payloads, self.group, self.ledger.traffic)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        self._count_sent(output.numel(), first, round(wire / first.message.nbytes))
        key = self._key(f"{unit.name}>{self.rank}", step, self.rank)
        payload = total.view(torch.uint8)[: first.payload.numel()]
        with self._timed("decode_s", vector):
            self.codec.decode_sum([payload], output, scale, [key])
        self._check_finite(output)
        self._audit(output, vector, scale)

    def _sum_linear(self, vector: Tensor, scale: float, unit: Unit) -> None:
        step = self._begin(vector, unit)
        payloads, first = self._encode_all(vector, unit, step)
        copies = 2 * (self.world_size - 1)
        with self.ledger.traffic.operation(copies * first.message.nbytes, vector.device):
            dist.all_reduce(payloads, group=self.group)
        self._count(raw=2 * self._share_of_others(vector.nbytes), wire=0.0)
        self._count_sent(vector.numel() // self.world_size, first, copies)
        size = first.payload.numel()
        sums = [chunk.view(torch.uint8)[:size] for chunk in self._chunks(payloads)]
        self._decode_sums(vector, sums, scale, unit, step)

    def _sum(self, vector: Tensor, scale: float, unit: Unit) -> None:
        self._report(vector)
        self._native.all_reduce(vector, scale, unit)

    def _encode_all(self, vector: Tensor, unit: Unit, step: int) -> tuple[Tensor, Sealed]:
        """Return the payloads of all chunks as one float32 vector, and the first one alone.

        Each is padded with zeros to a multiple of 8 bytes.
        """
        chunks = self._chunks(vector)
        size = self.codec.payload_bytes(chunks[0].numel())
        stride = size + -size % 8
        buffer = self._buffers.bytes("sent", stride * len(chunks), vector.device)
        slots = self._chunks(buffer)
        with self._timed("encode_s", vector):
            for to, (chunk, slot) in enumerate(zip(chunks, slots, strict=True)):
                self._encode(chunk, f"{unit.name}>{to}", step, slot[:size])
                slot[size:].zero_()
        return buffer.view(torch.float32), Sealed(slots[0], slots[0][:size])
