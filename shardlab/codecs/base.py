"""Contracts of codecs: a float vector to a byte payload and back; the unit that a vector is of."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from shardlab.kernels.native import check, check_floats


class Block(NamedTuple):
    """One parameter of a unit, as a matrix of its first dimension by all others."""

    name: str
    rows: int
    columns: int


class Unit(NamedTuple):
    """Name and blocks of a message; the same on all ranks and in all steps.

    Blocks are consecutive. In a vector that is to be scattered over W ranks each of the W equal
    chunks holds ceil(rows / W) rows of each block, padded with zeros at the end (the layout of
    gradients in `torch.distributed.fsdp.fully_shard`); in a vector that is not scattered every
    block is whole. Without blocks only the length is known.
    """

    name: str
    blocks: tuple[Block, ...] = ()

    def chunk_sizes(self, world_size: int) -> list[int]:
        """Return the elements of each block in one chunk."""
        return [-(-block.rows // world_size) * block.columns for block in self.blocks]


class MessageKey(NamedTuple):
    """Identity of one message of a run, from which random codecs draw reproducible numbers."""

    seed: int
    step: int
    unit: str
    rank: int

    def words(self) -> tuple[int, int]:
        """Return two numbers of 32 bits, different from those of every other key (BLAKE2b)."""
        text = f"{self.seed}\0{self.step}\0{self.unit}\0{self.rank}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")

    def shared(self) -> "MessageKey":
        """Return the key that the messages of all ranks share."""
        return self._replace(rank=-1)


class PayloadContent(NamedTuple):
    """Parts of a payload of n elements."""

    elements: int
    """elements that are sent"""
    index_bytes: int
    """bytes of their positions"""
    metadata_bytes: int
    """scales, counts and all else that is neither an element nor a position"""


class Codec(ABC):
    """Encoder of float32 vectors into payloads, and decoder that adds to a vector.

    Laws, for every vector x of n elements:

    - the payload is one contiguous `uint8` tensor, complete: codec, n and key are enough to decode
      it;
    - it has `payload_bytes(n)` bytes; at most as many if the codec is `variable`;
    - `encode` is a function of (x, key) alone: same bytes on every machine and thread count;
    - `decode_add(payload, out, alpha)` adds `alpha * D(payload)` to `out` and changes nothing else;
    - `decode_sum(payloads, out, alpha)` makes out = alpha * (D(payload 0) + D(payload 1) + ...).
      Except for codecs whose specification `votes`: their sum of several payloads is a majority
      vote, and only a single payload decodes to alpha * D(payload);
    - after `encode_residual(x, e, kept)`: D(payload) + kept = x + e, up to one rounding in float32;
    - an x with a NaN or an infinity decodes to a vector that holds a NaN or an infinity, and
      `kept` is finite wherever e was: errors are always detected and never kept; numbers beyond the
      range of fp16 count as infinities there;
    - a linear codec's payloads, viewed as float32, may be summed before they are decoded.

    Payloads start at a multiple of 8 bytes. Buffers of one call never overlap, except that `kept`
    may be `residual`.
    """

    name: ClassVar[str]
    """name in strategies"""
    unbiased: bool
    """the mean of D(encode(x, key)) over keys is x"""
    random: bool = False
    """what is sent depends on the key, too"""
    random_elements: ClassVar[bool] = False
    """which elements are sent depends on the key, and on nothing else"""
    linear: bool = False
    """payloads can be summed on the wire"""
    variable: bool = False
    """the payload's size depends on the values"""

    @abstractmethod
    def payload_bytes(self, n: int) -> int:
        """Return the bytes of the payload of n elements; the largest possible if `variable`."""

    @abstractmethod
    def content(self, n: int, payload: Tensor) -> PayloadContent:
        """Return the parts of `payload`, which encodes n elements."""

    @abstractmethod
    def encode(
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the payload of a contiguous float32 vector.

        Args:
            key: needed by random codecs.
            out: uint8 [payload_bytes(n)] to write to; the payload is the used part of it.
        """

    @abstractmethod
    def decode_add(
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        """Add `alpha` times the decoded payload to the float32 vector `out`.

        Args:
            key: of the encoding; needed by codecs whose choice of elements is random.

        Raises:
            ValueError: the payload cannot have come from this codec and `out.numel()` elements.
        """

    def encode_residual(
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the payload of `vector + residual`; write to `kept` what it loses.

        The error-feedback step of Seide et al. 2014 (section 3.1) and Karimireddy et al. 2019
        (algorithm 2). Where the difference is not finite, `kept` is the old residual. Codecs
        override it with one pass over memory.
        """
        wanted = vector + residual
        payload = self.encode(wanted, key, out)
        self.decode_add(payload, wanted, -1.0, key)
        torch.where(wanted.isfinite(), wanted, residual, out=kept)
        return payload

    def decode_sum(
        self,
        payloads: Sequence[Tensor],
        out: Tensor,
        alpha: float = 1.0,
        keys: Sequence[MessageKey] | None = None,
    ) -> None:
        """Set out to alpha * (D(payload 0) + D(payload 1) + ...), summed in this order in float32.

        The owner of a shard calls it with the payloads of all ranks. Codecs override it with one
        pass over memory; those that vote, with the vote in place of the sum.
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
    """Base of codecs that encode with or without a residual, and add or set sums, in one pass."""

    @abstractmethod
    def write(
        self,
        x: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        """Encode `x`, or `x + residual`, as `encode` and `encode_residual` do.

        Args:
            kept: written where there is a residual.
            payload: written; what is returned is the used part of it.
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
        """Decode as `decode_sum` and, for one payload that is to be added, `decode_add` do."""

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self.write(vector, None, None, key, self._buffer(vector, out))

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return self.write(vector, residual, kept, key, self._buffer(vector, out))

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
        self, x: Tensor, residual: Tensor | None, kept: Tensor | None, payload: Tensor
    ) -> None:
        check_floats(x, residual=residual, kept=kept)
        check("payload", payload, self.payload_bytes(x.numel()), x.device, torch.uint8)

    def _check_read(self, payloads: list[Tensor], out: Tensor) -> None:
        check_floats(out)
        for payload in payloads:
            self._check_payload(payload, out.numel())
            check("payload", payload, payload.numel(), out.device, torch.uint8)


def key_words(key: MessageKey | None, name: str) -> tuple[int, int]:
    """Return the words of the key of a message, which a random codec needs.

    Raises:
        ValueError: there is none.
    """
    if key is None:
        raise ValueError(f"{name}: a random codec needs the key of the message")
    return key.words()
