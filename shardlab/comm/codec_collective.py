"""Base of collectives over a codec: selection of messages, their steps, envelopes and counts."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey
from shardlab.codecs.identity import Identity
from shardlab.codecs.unit import Unit
from shardlab.codecs.wire import (
    HEADER,
    Buffers,
    Contents,
    PayloadError,
    describe,
    message_bytes,
    seal,
    unseal,
)
from shardlab.comm.collective import Collective
from shardlab.comm.feedback import ErrorFeedback
from shardlab.comm.ledger import Kind, Ledger, extra_collective, timed
from shardlab.comm.steps import Updates


class CodecCollective(Collective):
    """A collective that moves vectors as payloads of a codec.

    A vector that the codec cannot take is sent as it is and is listed in the ledger under
    `uncompressed`: one that is not float32, and one of fewer than `minimum_size` elements.

    Args:
        feedback: residuals of this rank, or None.
        seed: of random codecs; the same on all ranks.
        updates: of the parameters that are sent: until the next one all messages of a unit are
            drawn alike. None: every message is drawn anew.

    Raises:
        PayloadError: (all collectives) a payload is damaged, or the ranks do not do the same.
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
        updates: Updates | None = None,
    ) -> None:
        super().__init__(group, ledger, kind)
        self.codec = codec
        self.feedback = feedback
        self.minimum_size = minimum_size
        self._seed = seed
        self._updates = updates
        self._name = describe(codec)
        self._steps: dict[str, int] = {}
        self._agreed: set[tuple[str, int, str]] = set()
        self._buffers = Buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """How many messages of each unit went through: random codecs continue from there."""
        return {unit: torch.tensor(step) for unit, step in self._steps.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continues from saved counts."""
        self._steps = {unit: int(step) for unit, step in state.items()}

    def _takes(self, vector: Tensor) -> bool:
        """Whether the codec serves for this message."""
        return not isinstance(self.codec, Identity) and self._obstacle(vector) is None

    def _obstacle(self, vector: Tensor) -> str | None:
        """Why a message cannot go through the codec."""
        if vector.dtype != torch.float32:
            return f"{vector.dtype}"
        if vector.numel() < self.minimum_size:
            return f"fewer than {self.minimum_size} elements"
        return None

    def _report(self, vector: Tensor) -> None:
        """The ledger learns of a message that a codec was meant for but does not take."""
        obstacle = self._obstacle(vector)
        if obstacle is not None and not isinstance(self.codec, Identity):
            self.account.uncompressed[obstacle] += 1

    def _begin(self, vector: Tensor, unit: Unit) -> int:
        """The step of this message of the unit.

        When a rank sees a message of this kind for the first time, all ranks compare what they are
        about to do: bytes of another number than awaited would end the process without a word.
        """
        if self._updates is None:
            step = self._steps.get(unit.name, 0)
            self._steps[unit.name] = step + 1
        else:
            step = self._updates.count
        self._report(vector)
        what = self._name if self._takes(vector) else f"none ({vector.dtype})"
        seen = (unit.name, vector.numel(), what)
        if seen not in self._agreed and self.world_size > 1:
            self._agree(Contents(what, vector.numel(), unit.name, step), vector.device)
            self._agreed.add(seen)
        return step

    def _agree(self, contents: Contents, device: torch.device) -> None:
        own = torch.tensor([contents.identity()], device=device)
        others = [torch.empty_like(own) for _ in range(self.world_size)]
        others[self.rank] = own
        with extra_collective(self.account):
            self.transport.exchange([own] * self.world_size, others)
        self._count_number()
        for rank, other in enumerate(others):
            contents.check(int(other), rank)

    def _encode(self, vector: Tensor, part: str, step: int, out: Tensor) -> Tensor:
        """The payload of a vector, at the beginning of `out`."""
        key = self._key(part, step, self.rank)
        if self.feedback is None:
            payload = self.codec.encode(vector, key, out)
        else:
            payload = self.feedback.encode(self.codec, vector, part, key, out)
        # an empty tensor has no address
        if payload.numel() and payload.data_ptr() != out.data_ptr():
            raise ValueError(f"codec {self.codec.name!r} wrote elsewhere than to `out`")
        return payload

    def _seal(self, vectors: Sequence[Tensor], parts: Sequence[str], step: int) -> list["Sealed"]:
        """The messages of vectors of equal length; part i names vector i."""
        n = vectors[0].numel()
        bound = self.codec.payload_bytes(n)
        sizes = [message_bytes(bound)] * len(vectors)
        room = self._buffers.messages("sent", sizes, vectors[0].device)
        result = []
        with timed(self.account, "encode_s"):
            for vector, part, message in zip(vectors, parts, room, strict=True):
                payload = self._encode(vector, part, step, message[HEADER : HEADER + bound])
                message = seal(message, payload.numel(), self._contents(n, part, step))
                result.append(Sealed(message, payload))
        return result

    def _swap(self, mine: Sequence["Sealed"], n: int, part: str, step: int) -> list[Tensor]:
        """Message i goes to rank i; returns the payloads of all ranks, in rank order.

        Args:
            part: names what this rank receives.
        """
        sizes = self._incoming(mine, n)
        wanted = [0 if rank == self.rank else message_bytes(s) for rank, s in enumerate(sizes)]
        room = self._buffers.messages("received", wanted, mine[0].message.device)
        self.transport.exchange([sealed.message for sealed in mine], room)
        contents = self._contents(n, part, step)
        with timed(self.account, "decode_s"):
            return [
                mine[rank].payload if rank == self.rank else unseal(message, size, contents, rank)
                for rank, (message, size) in enumerate(zip(room, sizes, strict=True))
            ]

    def _incoming(self, mine: Sequence["Sealed"], n: int) -> list[int]:
        """Bytes of the payloads that this rank will get; those of variable codecs are asked for."""
        bound = self.codec.payload_bytes(n)
        if not self.codec.variable or self.world_size == 1:
            return [bound] * self.world_size
        outgoing = torch.tensor(
            [sealed.payload.numel() for sealed in mine], device=mine[0].payload.device
        )
        incoming = outgoing.clone()
        with extra_collective(self.account):
            self.transport.exchange(outgoing.split(1), incoming.split(1))
        self._count_number()
        sizes: list[int] = incoming.tolist()
        for rank, size in enumerate(sizes):
            if not 0 <= size <= bound:
                raise PayloadError(
                    f"rank {rank} announces a payload of {size} bytes, codec {self._name} makes at "
                    f"most {bound} of {n} elements"
                )
        return sizes

    def _key(self, part: str, step: int, rank: int) -> MessageKey:
        return MessageKey(self._seed, step, part, rank)

    def _keys(self, part: str, step: int) -> list[MessageKey]:
        """Of the messages of all ranks, in rank order."""
        return [self._key(part, step, rank) for rank in range(self.world_size)]

    def _contents(self, n: int, part: str, step: int) -> Contents:
        return Contents(self._name, n, part, step)

    def _count_number(self) -> None:
        """A number of 8 bytes to every other rank."""
        nbytes = 8 * (self.world_size - 1)
        self._count(raw=0.0, wire=float(nbytes))
        self.account.metadata_bytes += nbytes

    def _count_sent(self, n: int, sealed: "Sealed", copies: int) -> None:
        """A message of n elements to so many ranks."""
        account, content = self.account, self.codec.content(n, sealed.payload)
        envelope = sealed.message.numel() - sealed.payload.numel()
        account.bytes_wire += copies * sealed.message.numel()
        account.elements += copies * n
        account.elements_sent += copies * content.elements
        account.index_bytes += copies * content.index_bytes
        account.metadata_bytes += copies * (content.metadata_bytes + envelope)


class Sealed(NamedTuple):
    """A payload in its envelope, as it is sent."""

    message: Tensor
    payload: Tensor
    """the part of `message` that the codec wrote"""
