"""Collectives over any codec: all-to-all of payloads, decoded and summed by the owner.

One quantization per value and float32 sums, so the error does not grow with the number of ranks
(qgZ of ZeRO++, Wang et al. 2023, section 3.3; SDP4Bit, Jia et al. 2024).
"""

import torch
from torch import Tensor

from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import HEADER, seal
from shardlab.comm.codec_collective import CodecCollective, Sealed
from shardlab.comm.collective import add_up, labelled
from shardlab.comm.ledger import timed


class AllToAllCollective(CodecCollective):
    """Moves vectors as payloads of a codec, each in an envelope.

    Vectors that the codec does not take, and all vectors of codec `none`, travel as they are: no
    envelope, no copy, the owner adds up what it receives.
    """

    @labelled
    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        step = self._begin(vector, unit)
        if self._takes(vector):
            payloads, part = self._scatter(vector, unit, step), f"{unit.name}>{self.rank}"
            with timed(self.account, "decode_s"):
                self.codec.decode_sum(payloads, output, scale, self._keys(part, step))
        else:
            parts = self._chunks(vector)
            mine = parts[self.rank]
            room = self._buffers.bytes("received", vector.nbytes, vector.device)
            taken = self._chunks(room.view(vector.dtype))
            taken[self.rank] = mine
            self.transport.exchange(parts, taken)
            add_up(taken, output, scale)
            self._count_plain(vector)
        self._check_finite(output)
        self._audit(output, vector, scale)

    @labelled
    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """A reduce-scatter and an all-gather of the owners' sums; each has its own residual.

        Payloads that can be summed are encoded once: the owners gather the summed payloads.
        """
        n, size = vector.numel(), self.world_size
        padded = vector if n % size == 0 else torch.nn.functional.pad(vector, (0, -n % size))
        if self.codec.linear and self._takes(padded):
            self._sum_linear(padded, scale, unit)
        else:
            self._sum(padded, scale, unit)
        if padded is not vector:
            vector.copy_(padded[:n])

    @labelled
    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """The owner too uses its decoded payload, so that all ranks hold the same values."""
        step = self._begin(output, unit)
        if not self._takes(output):
            self.transport.gather(shard, self._chunks(output))
            self._count_plain(output)
            return
        part, n = f"{unit.name}<", shard.numel()
        (sealed,) = self._seal([shard], [part], step)
        payloads = self._swap([sealed] * self.world_size, n, part, step)
        with timed(self.account, "decode_s"):
            for rank, (chunk, payload) in enumerate(
                zip(self._chunks(output), payloads, strict=True)
            ):
                self.codec.decode_sum([payload], chunk, 1.0, [self._key(part, step, rank)])
        self._count(raw=self._share_of_others(output.nbytes), wire=0.0)
        self._count_sent(n, sealed, self.world_size - 1)

    def _scatter(self, vector: Tensor, unit: Unit, step: int) -> list[Tensor]:
        """Chunk i goes to rank i, encoded; returns the payloads of this rank's chunk."""
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
        (message,) = self._buffers.messages("summed", [HEADER + size + -size % 8], vector.device)
        payload = message[HEADER : HEADER + size]
        with timed(self.account, "decode_s"):
            add_up([p.view(torch.float32) for p in payloads], payload.view(torch.float32), 1.0)
            sealed = Sealed(seal(message, size, self._contents(n, part, step)), payload)
        sums = self._swap([sealed] * self.world_size, n, part, step)
        self._count(raw=self._share_of_others(vector.nbytes), wire=0.0)
        self._count_sent(n, sealed, self.world_size - 1)
        self._decode_sums(vector, sums, scale, unit, step)

    def _decode_sums(
        self, vector: Tensor, sums: list[Tensor], scale: float, unit: Unit, step: int
    ) -> None:
        """Chunk i of `vector` becomes scale * what the summed payload i holds."""
        given = vector if self.ledger.audit is None else vector.clone()
        chunks = self._chunks(vector)
        with timed(self.account, "decode_s"):
            for owner, (chunk, payload) in enumerate(zip(chunks, sums, strict=True)):
                key = self._key(f"{unit.name}>{owner}", step, owner)
                self.codec.decode_sum([payload], chunk, scale, [key])
        self._check_finite(vector)
        self._audit(chunks[self.rank], given, scale)

    def _count_plain(self, vector: Tensor) -> None:
        """A vector [world_size * n] of which every rank gets a part, as it is."""
        needed = self._share_of_others(vector.nbytes)
        elements = vector.numel() // self.world_size * (self.world_size - 1)
        self._count(raw=needed, wire=needed)
        self.account.elements += elements
        self.account.elements_sent += elements
