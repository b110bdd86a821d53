"""Base of collectives over a codec: envelopes, counts and exchange of payloads."""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

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
from shardlab.comm.feedback import ErrorFeedback, Updates
from shardlab.comm.ledger import Kind, Ledger


class CodecSettings(NamedTuple):
    """Settings that all collectives with a codec or a multi-phase method share."""

    feedback: ErrorFeedback | None = None
    """residuals of this rank"""
    minimum_size: int = 0
    """messages of fewer elements are sent uncompressed"""
    seed: int = 0
    """of random codecs; the same on all ranks"""
    updates: Updates | None = None
    """of the parameters that are sent: all messages of a unit between two updates use the same
    random numbers; without it every message has new ones"""


DEFAULT = CodecSettings()


class CodecCollective(Collective):
    """Collective that sends vectors as payloads of a codec.

    A vector that the codec does not support is sent uncompressed, and the ledger lists the reason
    under `uncompressed`: fewer than `minimum_size` elements, or another dtype than float32
    (`BypassCollective` widens bf16 and fp16).

    Raises:
        ValueError: the class needs a linear codec, whose payloads can be summed.
        PayloadError: (all collectives) a payload is damaged, or ranks call different collectives.
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
    ) -> None:
        if self.linear_only and not codec.linear:
            raise ValueError(f"codec {codec.name!r} cannot be summed on the wire")
        super().__init__(group, ledger, kind)
        self.codec = codec
        self.feedback, self.minimum_size, self._seed, self._updates = settings
        self._name = describe(codec)
        self._steps: dict[str, int] = {}
        self._agreed: set[tuple[str, int, str]] = set()
        self._buffers = Buffers()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the number of messages of each unit, from which random codecs continue."""
        return {unit: torch.tensor(step) for unit, step in self._steps.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:  # noqa: D102
        self._steps = {unit: int(step) for unit, step in state.items()}

    def _compresses(self, vector: Tensor) -> bool:
        return not isinstance(self.codec, Identity) and self._obstacle(vector) is None

    def _obstacle(self, vector: Tensor) -> str | None:
        """Return why the codec does not support a message."""
        if vector.numel() < self.minimum_size:
            return f"fewer than {self.minimum_size} elements"
        if vector.dtype != torch.float32:
            return f"{vector.dtype}"
        return None

    def _report(self, vector: Tensor) -> None:
        """Count a message that a codec was meant for but does not support."""
        obstacle = self._obstacle(vector)
        if obstacle is not None and not isinstance(self.codec, Identity):
            self.account.uncompressed[obstacle] += 1

    def _begin(self, vector: Tensor, unit: Unit) -> int:
        """Return the step of this message of the unit.

        Before the first message of each kind all ranks compare what they are about to send: gloo
        aborts the process, without an error, when a message has an unexpected size.
        """
        if self._updates is None:
            step = self._steps.get(unit.name, 0)
            self._steps[unit.name] = step + 1
        else:
            step = self._updates.count
        self._report(vector)
        what = self._name if self._compresses(vector) else f"none ({vector.dtype})"
        seen = (unit.name, vector.numel(), what)
        if seen not in self._agreed and self.world_size > 1:
            self._agree(Contents(what, vector.numel(), unit.name, step), vector.device)
            self._agreed.add(seen)
        return step

    def _agree(self, contents: Contents, device: torch.device) -> None:
        own = torch.tensor([contents.identity()], device=device)
        others = [torch.empty_like(own) for _ in range(self.world_size)]
        others[self.rank] = own
        with self.ledger.extra_collective(self.account, device):
            self.transport.exchange([own] * self.world_size, others)
        self._count_number()
        for rank, other in enumerate(others):
            contents.check(int(other), rank)

    def _encode(self, vector: Tensor, part: str, step: int, out: Tensor) -> Tensor:
        """Return the payload of a vector, written to the beginning of `out`."""
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
        """Return the messages of vectors of equal length; part i names vector i."""
        n = vectors[0].numel()
        bound = self.codec.payload_bytes(n)
        sizes = [message_bytes(bound)] * len(vectors)
        buffers = self._buffers.messages("sent", sizes, vectors[0].device)
        result = []
        with self._timed("encode_s", vectors[0]):
            for vector, part, message in zip(vectors, parts, buffers, strict=True):
                payload = self._encode(vector, part, step, message[HEADER : HEADER + bound])
                message = seal(message, payload.numel(), self._contents(n, part, step))
                result.append(Sealed(message, payload))
        return result

    def _swap(self, mine: Sequence["Sealed"], n: int, part: str, step: int) -> list[Tensor]:
        """Send message i to rank i; return the payloads of all ranks, in rank order.

        Args:
            part: names what this rank receives.
        """
        sizes = self._incoming(mine, n)
        expected = [0 if rank == self.rank else message_bytes(s) for rank, s in enumerate(sizes)]
        received = self._buffers.messages("received", expected, mine[0].message.device)
        self.transport.exchange([sealed.message for sealed in mine], received)
        contents = self._contents(n, part, step)
        with self._timed("decode_s", mine[0].message):
            return [
                mine[rank].payload
                if rank == self.rank
                else unseal(message, size, contents, rank, self._read_later)
                for rank, (message, size) in enumerate(zip(received, sizes, strict=True))
            ]

    def _incoming(self, mine: Sequence["Sealed"], n: int) -> list[int]:
        """Return the bytes of each payload to receive; variable codecs exchange them first."""
        bound = self.codec.payload_bytes(n)
        if not self.codec.variable or self.world_size == 1:
            return [bound] * self.world_size
        outgoing = torch.tensor(
            [sealed.payload.numel() for sealed in mine], device=mine[0].payload.device
        )
        incoming = outgoing.clone()
        with self.ledger.extra_collective(self.account, outgoing.device):
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

    def _read_later(self, value: Tensor, read: Callable[[int], None]) -> None:
        self.ledger.deferred.value(self.account, value, lambda _, found: read(int(found)))

    def _key(self, part: str, step: int, rank: int) -> MessageKey:
        return MessageKey(self._seed, step, part, rank)

    def _contents(self, n: int, part: str, step: int) -> Contents:
        return Contents(self._name, n, part, step)

    def _count_number(self) -> None:
        """Count a number of 8 bytes sent to every other rank."""
        nbytes = 8 * (self.world_size - 1)
        self._count(raw=0.0, wire=float(nbytes))
        self.account.metadata_bytes += nbytes

    def _count_sent(self, n: int, sealed: "Sealed", copies: int) -> None:
        """Count a message of n elements sent to `copies` ranks."""
        account, content = self.account, self.codec.content(n, sealed.payload)
        envelope = sealed.message.numel() - sealed.payload.numel()
        account.bytes_wire += copies * sealed.message.numel()
        account.elements += copies * n
        account.elements_sent += copies * content.elements
        account.index_bytes += copies * content.index_bytes
        account.metadata_bytes += copies * (content.metadata_bytes + envelope)


class Sealed(NamedTuple):
    """Payload in its envelope."""

    message: Tensor
    payload: Tensor
    """the part of `message` that the codec wrote"""
