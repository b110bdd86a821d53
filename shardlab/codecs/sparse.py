"""Sparse codecs, whose values another codec may encode: `topk`, `threshold`."""

import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlab.codecs import positions as coding
from shardlab.codecs import selection
from shardlab.codecs.base import Codec, FusedCodec, MessageKey, PayloadContent
from shardlab.codecs.floats import BFloat16, Float16
from shardlab.codecs.identity import Identity
from shardlab.codecs.integers import Int4, Int8
from shardlab.strategy.codec_options import Indices

VALUE_CODECS: dict[str, Callable[[], Codec]] = {
    "fp32": Identity,
    "fp16": Float16,
    "bf16": BFloat16,
    "int8": Int8,
    "int4": Int4,
}
"""by the option `values`, with their default groups"""


def decoded_values(codec: Codec, payload: Tensor, k: int, key: MessageKey | None) -> Tensor:
    """Return the k values that a value codec encoded; uncompressed ones as a view."""
    if isinstance(codec, Identity):
        return payload.view(torch.float32)
    return codec.decode(payload, k, key)


class Sparse(FusedCodec):
    """Selected elements with their positions; the residual keeps all others.

    Wire: the number of elements (uint32, only where n does not determine it), the values in order
    of their index as a payload of the value codec, then the indices (`shardlab.codecs.positions`).

    The composition with a value codec is the one of Qsparse-local-SGD (Basu et al. 2019, section
    2): contractions of delta1 and delta2 make one of at least delta1 * delta2, and what the value
    codec loses is in the residual too.

    Args:
        values: format of the selected elements: fp32, fp16, bf16, int8 or int4.
        indices: elias_fano, bitmap, or whichever is smaller.
    """

    unbiased = False
    _floor = 0
    """magnitude that an element must reach, as a bit pattern"""
    _count_bytes = 0

    def __init__(self, values: str, indices: Indices) -> None:
        self.values = VALUE_CODECS[values]()
        self.indices: Indices = indices
        self.variable = self._count_bytes > 0

    @abstractmethod
    def most(self, n: int) -> int:
        """Return the largest number of elements that are sent of n."""

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        k = self.most(n)
        # with fewer elements both parts are smaller
        size = self._count_bytes + self.values.payload_bytes(k)
        if self.variable:
            return size + coding.most_bytes(n, k, self.indices)
        return size + coding.Split.of(n, k, self.indices).size

    def content(self, n: int, payload: Tensor) -> PayloadContent:  # noqa: D102
        k = self._count(payload, n)
        size = self.values.payload_bytes(k)
        metadata = self.values.content(k, payload[self._count_bytes :][:size]).metadata_bytes
        index_bytes = payload.numel() - self._count_bytes - size
        return PayloadContent(k, index_bytes, self._count_bytes + metadata)

    def write(  # noqa: D102
        self,
        x: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        k = self.most(x.numel())
        if residual is None or kept is None:
            return self._join(*selection.largest(x, k, self._floor), x.numel(), key, payload)
        apart = kept.data_ptr() != residual.data_ptr()
        written = kept if apart else None
        values, positions = selection.largest(x, k, self._floor, residual, written)
        payload = self._join(values, positions, x.numel(), key, payload)
        sent = self._values(payload, len(values), key)
        selection.keep(None if apart else x, residual, kept, positions, values, sent)
        return payload

    def read(  # noqa: D102
        self,
        payloads: list[Tensor],
        out: Tensor,
        alpha: float,
        keys: Sequence[MessageKey] | None,
        add: bool,
    ) -> None:
        values, positions = self._parts(payloads, out.numel(), keys)
        if add:
            selection.scatter_add(values[0], positions[0], out, alpha)
        else:
            selection.scatter_sum(values, positions, out, alpha)

    def _join(
        self, values: Tensor, positions: Tensor, n: int, key: MessageKey | None, out: Tensor
    ) -> Tensor:
        """Write values and positions to `out`; return the used part of it."""
        if self._count_bytes:
            count = torch.tensor(list(struct.pack("<I", len(values))), dtype=torch.uint8)
            out[: self._count_bytes] = count
        size = self._count_bytes + self.values.payload_bytes(len(values))
        self.values.encode(values, key, out[self._count_bytes : size])
        payload = out[: size + coding.Split.of(n, len(positions), self.indices).size]
        coding.encode(positions, n, self.indices, payload[size:])
        return payload

    def _parts(
        self, payloads: Sequence[Tensor], n: int, keys: Sequence[MessageKey] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        counts = [self._count(payload, n) for payload in payloads]
        values = [
            self._values(payload, k, keys[index] if keys else None)
            for index, (payload, k) in enumerate(zip(payloads, counts, strict=True))
        ]
        positions = [
            payload[self._count_bytes + self.values.payload_bytes(k) :]
            for payload, k in zip(payloads, counts, strict=True)
        ]
        try:
            return values, coding.decode(positions, n, counts, self.indices)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    def _values(self, payload: Tensor, k: int, key: MessageKey | None) -> Tensor:
        part = payload[self._count_bytes :][: self.values.payload_bytes(k)]
        return decoded_values(self.values, part, k, key)

    def _count(self, payload: Tensor, n: int) -> int:
        """Return the number of elements in the payload.

        Raises:
            ValueError: it is too short for them.
        """
        self._check_payload(payload, n)
        k = self.most(n)
        if self._count_bytes and payload.numel() >= self._count_bytes:
            k = struct.unpack("<I", bytes(payload[: self._count_bytes].tolist()))[0]
        least = self._count_bytes + self.values.payload_bytes(k)
        if k > self.most(n) or payload.numel() < least:
            raise ValueError(
                f"{self.name}: payload of {payload.numel()} bytes cannot hold {k} of {n} elements"
            )
        return k


class TopK(Sparse):
    """Selection of the k = max(1, round(density * n)) elements of largest magnitude.

    Stich et al. 2018 (definition 2.1): biased, a contraction with delta >= k/n, so it needs error
    feedback. density * (32 + 8.6) bits per element at a density of 1 % of float32 values. Ties go
    to the lower index; NaN counts as larger than infinity. Not linear: every sender selects other
    elements.

    Wire: `Sparse`, without the number of elements.

    Args:
        density: fraction of the elements that is sent, above 0 and at most 1.
    """

    name = "topk"

    def __init__(
        self, density: float = 0.01, values: str = "fp32", indices: Indices = "smaller"
    ) -> None:
        super().__init__(values, indices)
        self.density = density

    def most(self, n: int) -> int:  # noqa: D102
        return min(n, max(1, round(self.density * n)))


class Threshold(Sparse):
    """Selection of elements with |x| >= threshold, at most the max(1, round(cap * n)) largest.

    Sahu et al. 2021 (the hard-threshold sparsifier): biased, an absolute compressor,
    ||C(x) - x||^2 <= n * threshold^2 where the cap does not bind, so it needs error feedback; the
    residual keeps what the cap excludes. 32 + index bits for each kept element and 32 bits per
    message. NaN and infinity are always selected, unless more than the cap are. Not linear.

    Wire: `Sparse`, with the number of elements; the size varies, so the host waits for a device.

    Args:
        threshold: smallest magnitude that is sent, as float32.
        cap: largest fraction of the elements that is sent.
    """

    name = "threshold"
    _count_bytes = 4

    def __init__(
        self,
        threshold: float,
        cap: float = 0.05,
        values: str = "fp32",
        indices: Indices = "smaller",
    ) -> None:
        super().__init__(values, indices)
        self.threshold = threshold
        self.cap = cap
        self._floor = int(torch.tensor(threshold, dtype=torch.float32).view(torch.int32))

    def most(self, n: int) -> int:  # noqa: D102
        return min(n, max(1, round(self.cap * n)))
