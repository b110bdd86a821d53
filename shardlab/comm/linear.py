"""Payloads that can be summed on the wire, through the process group's own collectives."""

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec
from shardlab.codecs.unit import Unit
from shardlab.comm.all_to_all import AllToAllCollective
from shardlab.comm.codec_collective import Sealed
from shardlab.comm.collective import Native, labelled, sum_scatter
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Kind, Ledger, timed


class LinearNative(AllToAllCollective):
    """The `native` route of linear codecs: payloads, viewed as float32, are summed on the way.

    No envelope, since sums have no checksum. Reductions equal those of `AllToAllCollective` up to
    the order of sums; all_gather is that of `AllToAllCollective`.

    Raises:
        ValueError: the codec's payloads cannot be summed.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ledger: Ledger,
        kind: Kind,
        codec: Codec,
        feedback: ErrorFeedback | None = None,
        minimum_size: int = 0,
        seed: int = 0,
    ) -> None:
        if not codec.linear:
            raise ValueError(f"codec {codec.name!r} cannot be summed on the wire")
        super().__init__(group, ledger, kind, codec, feedback, minimum_size, seed)
        self._native = Native(group, ledger, kind)

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        if not self._takes(vector):
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
        with timed(self.account, "decode_s"):
            self.codec.decode_sum([payload], output, scale, [key])
        self._check_finite(output)
        self._audit(output, vector, scale)

    def _sum_linear(self, vector: Tensor, scale: float, unit: Unit) -> None:
        step = self._begin(vector, unit)
        payloads, first = self._encode_all(vector, unit, step)
        copies = 2 * (self.world_size - 1)
        with self.ledger.traffic.operation(copies * first.message.nbytes):
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
        """The payloads of all chunks as one float32 vector, and the first one by itself.

        Each is padded with zeros to a multiple of 8 bytes.
        """
        chunks = self._chunks(vector)
        size = self.codec.payload_bytes(chunks[0].numel())
        stride = size + -size % 8
        room = self._buffers.bytes("sent", stride * len(chunks), vector.device)
        slots = self._chunks(room)
        with timed(self.account, "encode_s"):
            for to, (chunk, slot) in enumerate(zip(chunks, slots, strict=True)):
                self._encode(chunk, f"{unit.name}>{to}", step, slot[:size])
                slot[size:].zero_()
        return room.view(torch.float32), Sealed(slots[0], slots[0][:size])
