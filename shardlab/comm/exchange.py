"""Collectives over any codec: all-to-all of payloads, decoded and summed by the owner.

One quantization per value and float32 sums, so the error does not grow with the number of ranks
(qgZ of ZeRO++, Wang et al. 2023, section 3.3; SDP4Bit, Jia et al. 2024).
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.identity import Identity
from shardlab.codecs.unit import Unit
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Kind, Ledger, timed


class Exchange(Collective):
    """Moves vectors as payloads of a codec.

    Args:
        codec: for vectors of at least `minimum_size` elements; shorter ones travel as float32.
        feedback: residuals of this rank, or None.
        seed: of random codecs.
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
        super().__init__(group, ledger, kind)
        self.codec = codec
        self.feedback = feedback
        self.minimum_size = minimum_size
        self._seed = seed
        self._step = 0

    def reduce_scatter(self, output: Tensor, vector: Tensor, scale: float, unit: Unit) -> None:  # noqa: D102
        codec, feedback = self._choose(vector)
        chunks = list(vector.chunk(self.world_size))
        with timed(self.account, "encode_s"):
            payloads = [
                self._encode(codec, feedback, chunk, f"{unit.name}>{to}")
                for to, chunk in enumerate(chunks)
            ]
        received = self._all_to_all(payloads, _size(codec, output.numel()))
        with timed(self.account, "decode_s"):
            output.zero_()
            for payload in received:
                codec.decode_add(payload, output, scale)
        sent = [p for to, p in enumerate(payloads) if to != self.rank]
        self._count(
            raw=self._share_of_others(vector.nbytes), wire=float(sum(p.nbytes for p in sent))
        )
        self._count_content(codec, output.numel(), sent)
        if self.ledger.audit is not None:
            self.ledger.audit.add(output, self._exact(chunks, scale))

    def all_reduce(self, vector: Tensor, scale: float, unit: Unit) -> None:
        """A reduce-scatter and an all-gather of the owners' sums; each has its own residual."""
        n, size = vector.numel(), self.world_size
        padded = torch.nn.functional.pad(vector, (0, -n % size))
        shard = padded.new_empty(padded.numel() // size)
        self.reduce_scatter(shard, padded, scale, unit)
        self.all_gather(padded, shard, unit)
        vector.copy_(padded[:n])

    def all_gather(self, output: Tensor, shard: Tensor, unit: Unit) -> None:
        """The owner too uses its decoded payload, so that all ranks hold the same values."""
        codec, feedback = self._choose(output)
        with timed(self.account, "encode_s"):
            payload = self._encode(codec, feedback, shard, f"{unit.name}<")
        received = self._gather(payload, _size(codec, shard.numel()))
        with timed(self.account, "decode_s"):
            output.zero_()
            for part, piece in zip(output.chunk(self.world_size), received, strict=True):
                codec.decode_add(piece, part)
        copies = self.world_size - 1
        self._count(raw=self._share_of_others(output.nbytes), wire=float(copies * payload.nbytes))
        self._count_content(codec, shard.numel(), [payload] * copies)

    def next_step(self) -> None:
        """Random codecs draw new numbers from here on."""
        self._step += 1

    def _choose(self, vector: Tensor) -> tuple[Codec, ErrorFeedback | None]:
        if vector.numel() >= self.minimum_size:
            return self.codec, self.feedback
        self.account.uncompressed[f"fewer than {self.minimum_size} elements"] += 1
        return Identity(), None

    def _encode(
        self, codec: Codec, feedback: ErrorFeedback | None, vector: Tensor, part: str
    ) -> Tensor:
        key = MessageKey(self._seed, self._step, part, self.rank)
        if feedback is None:
            return codec.encode(vector, key)
        return feedback.encode(codec, vector, part, key)

    def _all_to_all(self, payloads: list[Tensor], size: int | None) -> list[Tensor]:
        """Payload i goes to rank i; returns the payloads of all ranks, in rank order."""
        sizes = [p.numel() for p in payloads]
        incoming = [size] * self.world_size if size is not None else self._sizes(sizes)
        given = torch.cat(payloads)
        taken = given.new_empty(sum(incoming))
        dist.all_to_all_single(taken, given, incoming, sizes, group=self.group)
        return _aligned(taken.split(incoming))

    def _gather(self, payload: Tensor, size: int | None) -> list[Tensor]:
        if size is None:
            return self._all_to_all([payload] * self.world_size, None)
        taken = payload.new_empty(size * self.world_size)
        dist.all_gather_single(taken, payload, group=self.group)
        return _aligned(taken.split(size))

    def _sizes(self, sizes: list[int]) -> list[int]:
        """An extra collective that tells every rank how many bytes it will get from each other."""
        outgoing = torch.tensor(sizes, dtype=torch.int64)
        incoming = torch.empty_like(outgoing)
        dist.all_to_all_single(incoming, outgoing, group=self.group)
        self._count(raw=0.0, wire=float(8 * (self.world_size - 1)), extra=1)
        self.account.metadata_bytes += 8 * (self.world_size - 1)
        return incoming.tolist()

    def _exact(self, chunks: list[Tensor], scale: float) -> Tensor:
        """The reduce-scatter in float32; counted nowhere, since no run needs it."""
        given = torch.cat(chunks)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        return taken.view(self.world_size, -1).sum(0).mul_(scale)

    def _count_content(self, codec: Codec, n: int, payloads: list[Tensor]) -> None:
        account = self.account
        for payload in payloads:
            content = codec.content(n, payload)
            account.elements += n
            account.elements_sent += content.elements
            account.index_bytes += content.index_bytes
            account.metadata_bytes += content.metadata_bytes


def _size(codec: Codec, n: int) -> int | None:
    return None if codec.variable else codec.payload_bytes(n)


def _aligned(payloads: Sequence[Tensor]) -> list[Tensor]:
    """Payloads that start where wide numbers may be read; only those that do not are copied."""
    return [p if p.data_ptr() % 8 == 0 else p.clone() for p in payloads]
