"""Base of the codecs that cut a vector into groups: payload layout, PyTorch reference, kernels.

Payload of n float32 elements in groups of G (the last group may be shorter):

    bytes                       content
    head_bytes * ceil(n / G)    head of each group: its scales
    ceil(n * bits / 8)          code of each element

Codes of fewer than 8 bits are packed in planes: a group of `count` elements has m =
ceil(count * bits / 8) bytes, and byte j holds the elements j, j + m, j + 2 m, ... from its lowest
bits up. Codes of 9 bits are the low bytes of all elements of a group, then their highest bits,
packed as codes of one bit.

Compiled kernels of csrc/grouped.h compute the same bits for some formats.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from shardlab.codecs.base import FusedCodec, MessageKey, PayloadContent, key_words
from shardlab.kernels import native
from shardlab.kernels.compiled import compiled_on_gpus, constant
from shardlab.kernels.operators import kernel
from shardlab.kernels.random import uniform

_LARGEST_GROUP = 4096  # csrc/decoding.h


class GroupedCodec(FusedCodec):
    """Codec that maps each group of elements to a head and codes.

    A subclass sets the sizes and defines `quantize` and `dequantize` in PyTorch. Both methods get
    many groups of one length at once and compute each group independently. They do not read values
    on the host, so that they can be compiled for GPUs. A group has a multiple of 8 elements, at
    most 4096. A code has 1, 2, 4, 8, 9 or 16 bits.

    Args:
        group: Elements that share a head.
        format: Name of the format; its kernels are FORMAT_encode and FORMAT_decode.
    """

    head_bytes: int
    """Bytes of the head of a group; part of the metadata."""
    bits: int
    """Bits of a code."""
    kernels: ClassVar[bool] = False
    """Whether csrc/ has kernels of the format."""

    def __init__(self, group: int, format: str | None = None) -> None:
        if group % 8 or not 8 <= group <= _LARGEST_GROUP:
            raise ValueError(f"group must be a multiple of 8 from 8 to 4096 (found {group})")
        self.format = self.name if format is None else format
        self.group = group

    @abstractmethod
    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return heads, uint8 [groups, head_bytes], and codes in [0, 2**bits), [groups, G].

        Args:
            rows: float32 [groups, G].
            chance: Random numbers of `random` codecs, uniform in [0, 1), float32 [groups, G].
        """

    @abstractmethod
    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        """Return the decoded rows, float32 [groups, G], from the heads and codes of `quantize`."""

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return self.head_bytes * -(-n // self.group) + self.code_bytes(n)

    def code_bytes(self, n: int) -> int:
        """Return the bytes of the codes of n elements."""
        last = n % self.group
        return n // self.group * self.group * self.bits // 8 + -(-last * self.bits // 8)

    def content(self, n: int, payload: Tensor) -> PayloadContent:  # noqa: D102
        return PayloadContent(n, 0, self.head_bytes * -(-n // self.group))

    def write(  # noqa: D102
        self,
        x: Tensor,
        residual: Tensor | None,
        new_residual: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        self._check_written(x, residual, new_residual, payload)
        words = key_words(key, self.name) if self.random else (0, 0)
        if self.kernels and native.compiled(x):
            encode, _ = _kernels(self.format)
            encode(x, residual, new_residual, self.group, *words, payload)
        else:
            encode_groups(self, x, residual, new_residual, *words, payload)
        return payload

    def read(  # noqa: D102
        self,
        payloads: list[Tensor],
        out: Tensor,
        alpha: float,
        keys: Sequence[MessageKey] | None,
        add: bool,
    ) -> None:
        self._check_read(payloads, out)
        if self.kernels and native.compiled(out):
            _, decode = _kernels(self.format)
            decode(payloads, self.group, alpha, add, out)
        else:
            decode_groups(self, payloads, out, alpha, add)


@compiled_on_gpus
def encode_groups(
    codec: GroupedCodec,
    x: Tensor,
    residual: Tensor | None,
    new_residual: Tensor | None,
    k0: int,
    k1: int,
    payload: Tensor,
) -> None:
    """Write the payload of `x + residual`, and its error to `new_residual`, in PyTorch."""
    corrected = x if residual is None else x + residual
    chance = uniform(len(x), k0, k1, x.device) if codec.random else None
    heads, packed, decoded = [], [], []
    for start, stop, width in _parts(codec, len(x)):
        chances = None if chance is None else chance[start:stop].view(-1, width)
        head, codes = codec.quantize(corrected[start:stop].view(-1, width), chances)
        heads.append(head)
        packed.append(pack(codes, constant(codec.bits)))
        if residual is not None:
            decoded.append(_unpacked(codec, head, packed[-1], width))
    if heads:
        # one write: torch.compile turns a write to a part of the payload into one over all of it
        payload.copy_(torch.cat([part.flatten() for part in (*heads, *packed)]))
    if residual is not None and new_residual is not None and decoded:
        error = corrected - torch.cat(decoded)
        new_residual.copy_(torch.where(error.isfinite(), error, residual))


@compiled_on_gpus
def decode_groups(
    codec: GroupedCodec, payloads: Sequence[Tensor], out: Tensor, alpha: float, add: bool
) -> None:
    """Set `out` to alpha times the sum of the decoded payloads, or add this sum to `out`."""
    total = _decoded(codec, payloads[0], out.numel())
    for payload in payloads[1:]:
        total = total + _decoded(codec, payload, out.numel())
    if add:
        out.add_(total * alpha)
    else:
        out.copy_(total * alpha)


def _decoded(codec: GroupedCodec, payload: Tensor, n: int) -> Tensor:
    size, bits, group = codec.head_bytes, constant(codec.bits), constant(codec.group)
    border, rows = size * -(-n // group), []
    for start, stop, width in _parts(codec, n):
        groups = (stop - start) // width
        heads = payload[size * (start // group) :][: size * groups].view(groups, size)
        packed = payload[border + start * bits // 8 :][: groups * -(-width * bits // 8)]
        rows.append(_unpacked(codec, heads, packed.view(groups, -1), width))
    return torch.cat(rows) if rows else payload.new_empty(0, dtype=torch.float32)


def _unpacked(codec: GroupedCodec, heads: Tensor, packed: Tensor, width: int) -> Tensor:
    return codec.dequantize(heads, unpack(packed, constant(codec.bits), width)).flatten()


def _parts(codec: GroupedCodec, n: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and group size of the full groups, then of the shorter last group."""
    group = constant(codec.group)
    full = n // group * group
    for start, stop, width in ((0, full, group), (full, n, n - full)):
        if start < stop:
            yield start, stop, width


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes [groups, count] in bytes, plane by plane: uint8 [groups, bytes]."""
    if bits == 8:
        return codes.to(torch.uint8)
    if bits == 16:
        return codes.to(torch.int16).view(torch.uint8)
    if bits == 9:
        return torch.cat([(codes & 0xFF).to(torch.uint8), pack(codes >> 8, 1)], 1)
    groups, count = codes.shape
    width, per_byte = -(-count * bits // 8), 8 // bits
    planes = torch.nn.functional.pad(codes.to(torch.uint8), (0, width * per_byte - count))
    packed = torch.zeros(groups, width, dtype=torch.uint8, device=codes.device)
    for number, plane in enumerate(planes.view(groups, per_byte, width).unbind(1)):
        packed |= plane << (bits * number)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes [groups, count] in `packed`: int16 for 9 and 16 bits, else uint8."""
    if bits == 8:
        return packed
    if bits == 16:
        # a copy, since slices of larger messages may start at odd addresses
        return packed.clone().view(torch.int16)
    if bits == 9:
        highest = unpack(packed[:, count:], 1, count).to(torch.int16)
        return packed[:, :count].to(torch.int16) | highest << 8
    planes = [(packed >> (bits * number)) & (2**bits - 1) for number in range(8 // bits)]
    return torch.cat(planes, 1)[:, :count]


@cache
def _kernels(format: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the kernels that encode and decode a format."""
    return (
        kernel(
            f"{format}_encode",
            "threads(x), Tensor x, Tensor? residual, Tensor(a!)? new_residual, size(x), int group, "
            "int k0, int k1, Tensor(b!) payload",
        ),
        kernel(
            f"{format}_decode",
            "threads(out), Tensor[] payloads, size(payloads), size(out), int group, float alpha, "
            "bool add, Tensor(a!) out",
        ),
    )
