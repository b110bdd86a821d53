"""Contract of codecs, which encode a float vector as a byte payload; names of what is encoded."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardlab.kernels.native import check, check_floats


class Block(NamedTuple):
    """One parameter of a unit, as a matrix: its first dimension by the product of the others."""

    name: str
    rows: int
    columns: int


class Unit(NamedTuple):
    """Name and blocks of a vector that is communicated; the same on all ranks and in all steps.

    Blocks are consecutive. A vector that is scattered over W ranks has W equal chunks, each with
    ceil(rows / W) rows of each block, padded with zeros at the end. This is the layout of gradients
    in `torch.distributed.fsdp.fully_shard`. A vector that is not scattered is one chunk. A unit
    without blocks says nothing about the layout.
    """

    name: str
    blocks: tuple[Block, ...] = ()

    def chunk_sizes(self, world_size: int) -> list[int]:
        """Return the number of elements of each block in one chunk."""
        return [-(-block.rows // world_size) * block.columns for block in self.blocks]


class MessageKey(NamedTuple):
    """Identity of one message of a run: the seed of the random numbers of its codec."""

    seed: int
    step: int
    unit: str
    rank: int

    def words(self) -> tuple[int, int]:
        """Return two numbers of 32 bits, a BLAKE2b hash of the key."""
        text = f"{self.seed}\0{self.step}\0{self.unit}\0{self.rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def shared(self) -> "MessageKey":
        """Return a key that is the same on all ranks."""
        return self._replace(rank=-1)


class PayloadContent(NamedTuple):
    """Composition of a payload of n elements."""

    elements: int
    """Elements that are sent."""
    index_bytes: int
    """Bytes of the positions of these elements."""
    metadata_bytes: int
    """Bytes of scales and counts."""


class Codec(ABC):
    """Encoder of float32 vectors into byte payloads, with its decoder.

    Laws, where x is a vector of n elements and D(payload) the decoded vector:

    - A payload is one contiguous `uint8` tensor. Codec, n and key are enough to decode it.
    - It has `payload_bytes(n)` bytes, or at most as many if the codec is `variable`.
    - `encode` depends only on x and the key: it returns the same bytes on every machine, with any
      number of threads.
    - `decode_add(payload, out, alpha)` adds `alpha * D(payload)` to `out`.
    - `decode_sum(payloads, out, alpha)` sets out to alpha * (D(payload 0) + D(payload 1) + ...).
      The exception are codecs whose specification sets `votes`: they decode several payloads to a
      majority vote.
    - `encode_residual(x, e, new_residual)` makes D(payload) + new_residual = x + e, up to one
      rounding in float32.
    - If x holds a NaN or an infinity, so does D(payload): the receiver detects the error. Where e
      is finite, `new_residual` is finite: the error does not stay in the residual. For codecs that
      send fp16, numbers beyond its range count as infinities.
    - Payloads of a `linear` codec, viewed as float32, may be summed before they are decoded.

    Payloads start at a multiple of 8 bytes. The tensors of one call must not overlap, except that
    `new_residual` may be `residual`.
    """

    name: ClassVar[str]
    """Name in strategies."""
    unbiased: bool
    """Whether the mean of D(encode(x, key)) over keys is x."""
    random: bool = False
    """Whether the payload depends on the key."""
    random_elements: ClassVar[bool] = False
    """Whether the positions of the elements that are sent depend only on the key."""
    linear: bool = False
    """Whether payloads can be summed on the wire."""
    variable: bool = False
    """Whether the size of a payload depends on the values."""

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the bytes of the payload of n elements; if `variable`, the largest possible."""

    @abstractmethod
    def content(self, n: int, payload: Tensor) -> PayloadContent:
        """Return the composition of `payload`, which encodes n elements."""

    @abstractmethod
    def encode(
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the payload of a contiguous float32 vector.

        Args:
            key: Key of the message; random codecs require it.
            out: uint8 [payload_bytes(n)] to write to. The payload is then its used part.
        """

    @abstractmethod
    def decode_add(
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        """Add `alpha` times the decoded payload to the float32 vector `out`.

        Args:
            key: Key of the encoding; codecs with `random_elements` require it.

        Raises:
            ValueError: This codec cannot have encoded `out.numel()` elements as this payload.
        """

    def encode_residual(
        self,
        vector: Tensor,
        residual: Tensor,
        new_residual: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the payload of `vector + residual`; write its error to `new_residual`.

        The error-feedback step of Seide et al. 2014 (section 3.1) and Karimireddy et al. 2019
        (algorithm 2). Where the error is not finite, `new_residual` becomes the old residual.
        Codecs override this method to read and write memory once.
        """
        corrected = vector + residual
        payload = self.encode(corrected, key, out)
        self.decode_add(payload, corrected, -1.0, key)
        torch.where(corrected.isfinite(), corrected, residual, out=new_residual)
        return payload

    def decode_sum(
        self,
        payloads: Sequence[Tensor],
        out: Tensor,
        alpha: float = 1.0,
        keys: Sequence[MessageKey] | None = None,
    ) -> None:
        """Set `out` to alpha * (D(payload 0) + D(payload 1) + ...), added in this order in float32.

        The owner of a shard calls it with the payloads of all ranks. Codecs override this method
        to read and write memory once. Codecs that vote write the vote in place of the sum.

        Args:
            keys: Keys of the payloads; codecs with `random_elements` require them.
        """
        out.zero_()
        for index, payload in enumerate(payloads):
            self.decode_add(payload, out, 1.0, keys[index] if keys else None)
        if alpha != 1.0:
            out.mul_(alpha)

    def decode(self, payload: Tensor, n: int, key: MessageKey | None = None) -> Tensor:
        """Return the decoded vector of n elements."""
        out = torch.zeros(n, dtype=torch.float32, device=payload.device)
        self.decode_add(payload, out, 1.0, key)
        return out

    def _check_payload(self, payload: Tensor, n: int) -> None:
        expected = self.payload_bytes(n)
        fits = payload.numel() <= expected if self.variable else payload.numel() == expected
        if payload.dtype != torch.uint8 or not fits:
            raise ValueError(
                f"{self.name}: payload of {payload.numel()} {payload.dtype} elements, expected "
                f"{'at most ' if self.variable else ''}{expected} bytes for {n} elements"
            )


class FusedCodec(Codec):
    """Base of codecs that read and write memory once, with and without a residual."""

    @abstractmethod
    def write(
        self,
        x: Tensor,
        residual: Tensor | None,
        new_residual: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        """Return the payload of `x`, or of `x + residual` if there is a residual.

        Args:
            new_residual: Set to the error, if there is a residual.
            payload: Buffer, uint8 [payload_bytes(n)]; its used part is returned.
        """

    @abstractmethod
    def read(
        self,
        payloads: list[Tensor],
        out: Tensor,
        alpha: float,
        keys: Sequence[MessageKey] | None,
        add: bool,
    ) -> None:
        """Set `out` to the decoded sum, as `decode_sum` does.

        Args:
            add: Add the one payload to `out` instead, as `decode_add` does.
        """

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self.write(vector, None, None, key, self._buffer(vector, out))

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        new_residual: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.write(vector, residual, new_residual, key, self._buffer(vector, out))

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self.read([payload], out, alpha, [key] if key else None, add=True)

    def decode_sum(  # noqa: D102
        self,
        payloads: Sequence[Tensor],
        out: Tensor,
        alpha: float = 1.0,
        keys: Sequence[MessageKey] | None = None,
    ) -> None:
        self.read(list(payloads), out, alpha, keys, add=False)

    def _buffer(self, vector: Tensor, out: Tensor | None) -> Tensor:
        if out is not None:
            return out
        return vector.new_empty(self.payload_bytes(vector.numel()), dtype=torch.uint8)

    def _check_written(
        self, x: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
    ) -> None:
        check_floats(x, residual=residual, new_residual=new_residual)
        check("payload", payload, self.payload_bytes(x.numel()), x.device, torch.uint8)

    def _check_read(self, payloads: list[Tensor], out: Tensor) -> None:
        check_floats(out)
        for payload in payloads:
            self._check_payload(payload, out.numel())
            check("payload", payload, payload.numel(), out.device, torch.uint8)


def key_words(key: MessageKey | None, name: str) -> tuple[int, int]:
    """Return the words of the key of a message.

    Args:
        name: Name of the codec, for the error.

    Raises:
        ValueError: The key is None.
    """
    if key is None:
        raise ValueError(f"{name}: a random codec needs the key of the message")
    return key.words()
