"""Formats that cut a vector into groups: payload layout, PyTorch reference, and one binding.

Payload of n float32 elements in groups of G (the last group may be shorter):

    bytes                       content
    head_bytes * ceil(n / G)    head of each group: its scales
    ceil(n * bits / 8)          code of each element

Codes of less than 8 bits are packed in planes: of the m = ceil(count * bits / 8) bytes of a group
of `count` elements, byte j holds elements j, j + m, j + 2 m, ... from its lowest bits up. Codes of
9 bits are their low bytes, one for each element of a group, then their highest bits so packed.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.codecs.kernels import native
from shardlab.codecs.kernels.native import FLOAT, INT, POINTER, address, addresses, function
from shardlab.codecs.kernels.operators import check_floats, check_payload, new_payload, register
from shardlab.codecs.kernels.parallel import for_ranges
from shardlab.codecs.kernels.random import uniform

_LARGEST_GROUP = 4096  # csrc/grouped.h


class Format(ABC):
    """Map of a group to a head and codes, in PyTorch; it defines the bits of csrc/ and Triton."""

    name: str
    """of the kernels of csrc/: NAME_encode and NAME_decode"""
    head_bytes: int
    bits: int
    """of a code: 1, 2, 4, 8, 9 or 16"""
    random: bool = False
    compiled: bool = True
    """csrc/ has kernels for it; otherwise these methods run on every device"""

    @abstractmethod
    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return heads, uint8 [groups, head_bytes], and codes in [0, 2**bits), [groups, G].

        Args:
            rows: float32 [groups, G].
            chance: for random formats, uniform in [0, 1), float32 [groups, G].
        """

    @abstractmethod
    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        """Return the decoded rows, float32 [groups, G], from what `quantize` returned."""


class GroupedKernel:
    """Compiled kernels of a format, with their reference."""

    def __init__(self, format: Format) -> None:
        self.format = format
        name = format.name
        self._c_encode = function(
            f"{name}_encode",
            *(POINTER, POINTER, POINTER, INT, INT, INT, INT),
            *(ctypes.c_uint32, ctypes.c_uint32, POINTER),
        )
        self._c_decode = function(
            f"{name}_decode", POINTER, INT, INT, INT, INT, INT, FLOAT, ctypes.c_int, POINTER
        )
        self._encode = register(
            f"{name}_encode(Tensor x, Tensor? residual, Tensor(a!)? kept, int group, int k0, "
            "int k1, Tensor(b!) payload) -> ()",
            self._run_encode,
        )
        self._decode = register(
            f"{name}_decode(Tensor[] payloads, int group, Tensor(a!) out, float alpha, bool add) "
            "-> ()",
            self._run_decode,
        )

    def payload_bytes(self, n: int, group: int) -> int:
        """Return the size of the payload of n elements."""
        return self.format.head_bytes * -(-n // group) + self._code_bytes(n, group)

    def encode(
        self,
        x: Tensor,
        group: int,
        key: tuple[int, int] = (0, 0),
        payload: Tensor | None = None,
    ) -> Tensor:
        """Return the payload of `x`.

        Args:
            x: float32 [n], contiguous.
            group: elements that share a head, a multiple of 8 up to 4096.
            key: words of the message's key, for random formats.
            payload: uint8 [payload_bytes(n, group)] to write to; a new one by default.
        """
        payload = self._buffer(x, group) if payload is None else payload
        self._encode(x, None, None, group, *key, payload)
        return payload

    def encode_residual(
        self,
        x: Tensor,
        residual: Tensor,
        kept: Tensor,
        group: int,
        key: tuple[int, int] = (0, 0),
        payload: Tensor | None = None,
    ) -> Tensor:
        """Return the payload of `x + residual`; write to `kept` what it loses.

        Args:
            residual, kept: float32 [n], contiguous; `kept` may be `residual`. Where what is lost is
                not finite, `kept` is the old residual.
        """
        payload = self._buffer(x, group) if payload is None else payload
        self._encode(x, residual, kept, group, *key, payload)
        return payload

    def decode_add(self, payload: Tensor, group: int, out: Tensor, alpha: float = 1.0) -> None:
        """Add `alpha * decoded payload` to `out`, float32 [n], with alpha rounded to float32."""
        self._decode([payload], group, out, alpha, True)

    def decode_sum(
        self, payloads: Sequence[Tensor], group: int, out: Tensor, alpha: float = 1.0
    ) -> None:
        """Set `out` to `alpha * sum of the decoded payloads`, summed in their order."""
        self._decode(list(payloads), group, out, alpha, False)

    def encode_reference(
        self,
        x: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        group: int,
        k0: int,
        k1: int,
        payload: Tensor,
    ) -> None:
        """Run the operator `NAME_encode` in PyTorch."""
        wanted = x if residual is None else x + residual
        chance = uniform(len(x), k0, k1, x.device) if self.format.random else None
        for where, width, heads, packed in self._parts(payload, group, len(x)):
            chances = None if chance is None else chance[where].view(-1, width)
            head, codes = self.format.quantize(wanted[where].view(-1, width), chances)
            heads.copy_(head)
            packed.copy_(pack(codes, self.format.bits))
        if residual is not None and kept is not None:
            rest = wanted - self._decoded(payload, group, len(x))
            kept.copy_(torch.where(rest.isfinite(), rest, residual))

    def decode_reference(
        self, payloads: Sequence[Tensor], group: int, out: Tensor, alpha: float, add: bool
    ) -> None:
        """Run the operator `NAME_decode` in PyTorch."""
        total = self._decoded(payloads[0], group, out.numel())
        for payload in payloads[1:]:
            total += self._decoded(payload, group, out.numel())
        if add:
            out += total * alpha
        else:
            torch.mul(total, alpha, out=out)

    def _decoded(self, payload: Tensor, group: int, n: int) -> Tensor:
        rows = [
            self.format.dequantize(heads, unpack(packed, self.format.bits, width)).flatten()
            for _, width, heads, packed in self._parts(payload, group, n)
        ]
        return torch.cat(rows) if rows else torch.empty(0, device=payload.device)

    def _parts(
        self, payload: Tensor, group: int, n: int
    ) -> Iterator[tuple[slice, int, Tensor, Tensor]]:
        """Yield all full groups, then the shorter last one, where there are such.

        Yields:
            elements, elements of a group, and views of the payload: heads [groups, head_bytes] and
            packed codes [groups, bytes].
        """
        size, bits, full = self.format.head_bytes, self.format.bits, n // group * group
        code_bytes = self._code_bytes(n, group)
        heads, codes = payload.split([payload.numel() - code_bytes, code_bytes])
        for start, stop, width in ((0, full, group), (full, n, n - full)):
            if start < stop:
                groups = (stop - start) // width
                head = heads[size * (start // group) :][: size * groups]
                packed = codes[start * bits // 8 :][: groups * -(-width * bits // 8)]
                yield (
                    slice(start, stop),
                    width,
                    head.view(groups, size),
                    packed.view(groups, -1),
                )

    def _code_bytes(self, n: int, group: int) -> int:
        return n // group * group * self.format.bits // 8 + -(-(n % group) * self.format.bits // 8)

    def _buffer(self, x: Tensor, group: int) -> Tensor:
        return new_payload(self.payload_bytes(x.numel(), group), x)

    def _run_encode(
        self,
        x: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        group: int,
        k0: int,
        k1: int,
        payload: Tensor,
    ) -> None:
        check_floats(x=x, residual=residual, kept=kept)
        self._check(payload, group, x)
        if not self._compiled(x):
            encode = getattr(self._on_gpu(x), "encode", self.encode_reference)
            encode(x, residual, kept, group, k0, k1, payload)
            return
        n, source, target = x.numel(), x.data_ptr(), payload.data_ptr()
        before, after = address(residual), address(kept)

        def part(start: int, stop: int) -> None:
            self._c_encode(source, before, after, n, group, start, stop, k0, k1, target)

        for_ranges(n, group, part)

    def _run_decode(
        self, payloads: list[Tensor], group: int, out: Tensor, alpha: float, add: bool
    ) -> None:
        check_floats(out=out)
        for payload in payloads:
            self._check(payload, group, out)
        if not self._compiled(out):
            decode = getattr(self._on_gpu(out), "decode", self.decode_reference)
            decode(payloads, group, out, alpha, add)
            return
        n, count, target = out.numel(), len(payloads), out.data_ptr()
        sources = addresses(payloads)

        def part(start: int, stop: int) -> None:
            self._c_decode(sources, count, n, group, start, stop, alpha, add, target)

        for_ranges(n, group, part)

    def _compiled(self, values: Tensor) -> bool:
        return self.format.compiled and native.compiled(values)

    def _on_gpu(self, values: Tensor) -> Any:
        """Return the Triton kernels of the format for these values; None without any."""
        kernels = native.triton_kernels(values)
        return kernels.formats.FORMATS.get(self.format.name) if kernels else None

    def _check(self, payload: Tensor, group: int, values: Tensor) -> None:
        if group % 8 or not 8 <= group <= _LARGEST_GROUP:
            raise ValueError(f"group must be a multiple of 8 from 8 to 4096 (found {group})")
        check_payload(payload, self.payload_bytes(values.numel(), group), values)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes [groups, count] in bytes, plane by plane: uint8 [groups, bytes]."""
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
    if bits == 16:
        # a copy, since slices of larger messages may start at odd addresses
        return packed.clone().view(torch.int16)
    if bits == 9:
        highest = unpack(packed[:, count:], 1, count).to(torch.int16)
        return packed[:, :count].to(torch.int16) | highest << 8
    planes = [(packed >> (bits * number)) & (2**bits - 1) for number in range(8 // bits)]
    return torch.cat(planes, 1)[:, :count]
