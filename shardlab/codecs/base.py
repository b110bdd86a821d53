"""The contract of a codec."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor


class MessageKey(NamedTuple):
    """Names one message of a run, so that random codecs draw the same numbers on every replay."""

    seed: int
    step: int
    unit: str
    rank: int


class Content(NamedTuple):
    """What a payload of n elements is made of."""

    elements: int
    """elements that are sent"""
    index_bytes: int
    """bytes that say which elements they are"""
    metadata_bytes: int
    """scales, counts and whatever else is neither an element nor an index"""


class Codec(ABC):
    """Turns a float32 vector into a payload and adds the decoded payload to another vector.

    Laws, for every vector x of n finite elements:
    - the payload is one contiguous `uint8` tensor with everything in it: whoever knows the codec
      and n can decode it;
    - `payload_bytes(n)` is its size, or None when the size depends on the values;
    - `encode` is a function of (x, key) alone: same bytes on every machine and thread count;
    - `decode_add(payload, out, alpha)` adds `alpha * D(payload)` to `out` and changes nothing else;
    - after `encode_residual(x, e)`: D(payload) + e_new = x + e_old, up to one rounding in float32;
    - a linear codec's payloads, viewed as float32, may be summed before they are decoded.
    """

    name: ClassVar[str]
    """what a strategy calls it"""
    unbiased: ClassVar[bool]
    """the mean of D(encode(x, key)) over keys is x"""
    linear: ClassVar[bool]
    """payloads can be summed on the wire"""

    @abstractmethod
    def payload_bytes(self, n: int) -> int | None:
        """Size of the payload of n elements in bytes."""

    @abstractmethod
    def content(self, n: int, payload: Tensor) -> Content:
        """What `payload`, made from n elements, consists of."""

    @abstractmethod
    def encode(self, vector: Tensor, key: MessageKey | None = None) -> Tensor:
        """The payload of a contiguous float32 vector; random codecs need the key."""

    @abstractmethod
    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """Adds `alpha` times the decoded payload to the float32 vector `out`.

        The payload's memory starts at a multiple of 8 bytes.

        Raises:
            ValueError: the payload cannot have come from this codec and `out.numel()` elements.
        """

    def encode_residual(
        self, vector: Tensor, residual: Tensor, key: MessageKey | None = None
    ) -> Tensor:
        """The payload of `vector + residual`; `residual` becomes what the payload leaves out.

        The error-feedback step of Seide et al. 2014 (section 3.1) and Karimireddy et al. 2019
        (algorithm 2). A codec with a faster way in one pass over memory overrides it.
        """
        residual.add_(vector)
        payload = self.encode(residual, key)
        self.decode_add(payload, residual, alpha=-1.0)
        return payload

    def decode(self, payload: Tensor, n: int) -> Tensor:
        """The decoded vector of n elements."""
        out = torch.zeros(n, dtype=torch.float32, device=payload.device)
        self.decode_add(payload, out)
        return out

    def _check_payload(self, payload: Tensor, n: int) -> None:
        expected = self.payload_bytes(n)
        if payload.dtype != torch.uint8 or payload.numel() != expected:
            raise ValueError(
                f"{self.name}: payload of {payload.numel()} {payload.dtype} elements, expected "
                f"{expected} bytes for {n} elements"
            )
