"""Sparse codecs, whose values may be encoded by another codec: `topk`, `threshold`."""

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
"""Codecs of values by the option `values`, with their default groups."""


def decoded_values(codec: Codec, payload: Tensor, k: int, key: MessageKey | None) -> Tensor:
    """Return the k values in the payload of a value codec; a view if they are uncompressed."""
    if isinstance(codec, Identity):
        return payload.view(torch.float32)
    return codec.decode(payload, k, key)


class Sparse(FusedCodec):
    """Selection of elements, sent with their positions; the other elements stay in the residual.

    Wire: the number of elements (uint32, only if n does not determine it), the values in order of
    their index as a payload of the value codec, then the indices (`shardlab.codecs.positions`).

    The composition with a value codec is from Qsparse-local-SGD (Basu et al. 2019, section 2):
    contractions with delta1 and delta2 compose to a contraction with at least delta1 * delta2. The
    error of the value codec is part of the residual.

    Args:
        values: Format of the selected elements: fp32, fp16, bf16, int8 or int4.
        indices: Coding of the positions: elias_fano, bitmap, or smaller (the shorter of the two).
    """

    unbiased = False
    _floor = 0
    """Smallest magnitude to select, as a bit pattern."""
    _count_bytes = 0

    def __init__(self, values: str, indices: Indices) -> None:
        self.values = VALUE_CODECS[values]()
        self.indices: Indices = indices
        self.variable = self._count_bytes > 0

    @abstractmethod
    def max_elements(self, n: int) -> int:
        """Return the largest number of n elements that are sent."""

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        k = self.max_elements(n)
        # the sizes of values and positions do not decrease with k, so the largest k is the bound
        size = self._count_bytes + self.values.payload_bytes(k)
        if self.variable:
            return size + coding.max_bytes(n, k, self.indices)
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
        new_residual: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        k = self.max_elements(x.numel())
        if residual is None or new_residual is None:
            return self._join(*selection.largest(x, k, self._floor), x.numel(), key, payload)
        separate = new_residual.data_ptr() != residual.data_ptr()
        # in place, x + residual must not be written before the elements are selected
        written = new_residual if separate else None
        values, positions = selection.largest(x, k, self._floor, residual, written)
        payload = self._join(values, positions, x.numel(), key, payload)
        sent = self._values(payload, len(values), key)
        selection.write_residual(
            None if separate else x, residual, new_residual, positions, values, sent
        )
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
        """Write values and positions to `out`, and return its used part."""
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
        """Return the number of elements in a payload.

        Raises:
            ValueError: The payload is too short for this number.
        """
        self._check_payload(payload, n)
        k = self.max_elements(n)
        if self._count_bytes and payload.numel() >= self._count_bytes:
            k = struct.unpack("<I", bytes(payload[: self._count_bytes].tolist()))[0]
        minimum = self._count_bytes + self.values.payload_bytes(k)
        if k > self.max_elements(n) or payload.numel() < minimum:
            raise ValueError(
                f"{self.name}: payload of {payload.numel()} bytes cannot hold {k} of {n} elements"
            )
        return k


class TopK(Sparse):
    """Selection of the k = max(1, round(density * n)) elements of largest magnitude.

    Stich et al. 2018 (definition 2.1). Biased, a contraction with delta >= k/n, so it needs error
    feedback. At a density of 1 % of float32 values, density * (32 + 8.6) bits per element. Ties go
    to the lower index; NaN counts as larger than infinity. Not linear, since senders select
    different elements.

    Wire: as `Sparse`, without the number of elements.

    Args:
        density: Fraction of the elements that is sent, above 0 and at most 1.
    """

    name = "topk"

    def __init__(
        self, density: float = 0.01, values: str = "fp32", indices: Indices = "smaller"
    ) -> None:
        super().__init__(values, indices)
        self.density = density

    def max_elements(self, n: int) -> int:  # noqa: D102
        return min(n, max(1, round(self.density * n)))


class Threshold(Sparse):
    """Selection of elements with |x| >= threshold, at most the max(1, round(cap * n)) largest.

    Sahu et al. 2021 (the hard-threshold sparsifier). Biased, so it needs error feedback. An
    absolute compressor: ||C(x) - x||^2 <= n * threshold^2 unless more elements than the cap reach
    the threshold; the elements above the cap stay in the residual. 32 + index bits per selected
    element and 32 bits per message. NaN and infinity are selected first. Not linear.

    Wire: as `Sparse`, with the number of elements. The size varies, so the host waits for a device.

    Args:
        threshold: Smallest magnitude that is sent, as float32.
        cap: Largest fraction of the elements that is sent.
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

    def max_elements(self, n: int) -> int:  # noqa: D102
        return min(n, max(1, round(self.cap * n)))
