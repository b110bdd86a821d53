"""Codecs that cut a vector into groups: one binding for all of them.

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
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.kernels import native
from shardlab.kernels.gpu import triton_kernels
from shardlab.kernels.native import FLOAT, INT, POINTER, function
from shardlab.kernels.operators import check_floats, check_payload, new_payload, register
from shardlab.kernels.parallel import for_ranges
from shardlab.kernels.planes import pack, unpack
from shardlab.kernels.random import uniform

_LARGEST_GROUP = 4096  # csrc/grouped.h


class Format(ABC):
    """Map of a group to a head and codes, in PyTorch; it defines the bits of csrc/NAME.cpp."""

    name: str
    """of the kernels: NAME_encode and NAME_decode"""
    head_bytes: int
    bits: int
    """of a code: 1, 2, 4, 8, 9 or 16"""
    random: bool = False
    compiled: bool = True
    """csrc/ has kernels for it; otherwise these methods serve on every device, as do those of a
    format that is written in PyTorch alone"""

    @abstractmethod
    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        """Heads, uint8 [groups, head_bytes], and codes, integers in [0, 2**bits) [groups, G].

        Args:
            rows: float32 [groups, G].
            chance: for random formats, uniform in [0, 1), float32 [groups, G].
        """

    @abstractmethod
    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        """The decoded rows, float32 [groups, G], from what `quantize` returned."""


class GroupedKernel:
    """The compiled kernels of a format, and their reference."""

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
        """Bytes that n elements take."""
        return self.format.head_bytes * -(-n // group) + self._code_bytes(n, group)

    def encode(
        self,
        x: Tensor,
        group: int,
        key: tuple[int, int] = (0, 0),
        payload: Tensor | None = None,
    ) -> Tensor:
        """The payload of `x`.

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
        """The payload of `x + residual`; `kept` becomes what it loses.

        Args:
            residual, kept: float32 [n], contiguous; `kept` may be `residual`. Where what is lost is
                not finite, `kept` is the residual as it was.
        """
        payload = self._buffer(x, group) if payload is None else payload
        self._encode(x, residual, kept, group, *key, payload)
        return payload

    def decode_add(self, payload: Tensor, group: int, out: Tensor, alpha: float = 1.0) -> None:
        """`out += alpha * decoded payload`, with alpha rounded to float32; out is float32 [n]."""
        self._decode([payload], group, out, alpha, True)

    def decode_sum(
        self, payloads: Sequence[Tensor], group: int, out: Tensor, alpha: float = 1.0
    ) -> None:
        """`out = alpha * sum of the decoded payloads`, summed in their order."""
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
        """The operator `NAME_encode` in PyTorch."""
        wanted = x if residual is None else x + residual
        n, full = x.numel(), x.numel() // group * group
        chance = uniform(n, k0, k1, x.device) if self.format.random else None
        heads, codes = payload.split(
            [payload.numel() - self._code_bytes(n, group), self._code_bytes(n, group)]
        )
        for start, stop, width in ((0, full, group), (full, n, n - full)):
            if start == stop:
                continue
            rows = wanted[start:stop].view(-1, width)
            chances = None if chance is None else chance[start:stop].view(-1, width)
            head, code = self.format.quantize(rows, chances)
            size = self.format.head_bytes
            heads[size * (start // group) :][: head.numel()] = head.flatten()
            packed = pack(code, self.format.bits).flatten()
            codes[start * self.format.bits // 8 :][: packed.numel()] = packed
        if residual is not None and kept is not None:
            rest = wanted - self._decoded(payload, group, n)
            kept.copy_(torch.where(rest.isfinite(), rest, residual))

    def decode_reference(
        self, payloads: Sequence[Tensor], group: int, out: Tensor, alpha: float, add: bool
    ) -> None:
        """The operator `NAME_decode` in PyTorch."""
        total = self._decoded(payloads[0], group, out.numel())
        for payload in payloads[1:]:
            total += self._decoded(payload, group, out.numel())
        if add:
            out += total * alpha
        else:
            torch.mul(total, alpha, out=out)

    def _decoded(self, payload: Tensor, group: int, n: int) -> Tensor:
        full, size, bits = n // group * group, self.format.head_bytes, self.format.bits
        heads, codes = payload.split(
            [payload.numel() - self._code_bytes(n, group), self._code_bytes(n, group)]
        )
        parts = []
        for start, stop, width in ((0, full, group), (full, n, n - full)):
            if start == stop:
                continue
            groups = (stop - start) // width
            head = heads[size * (start // group) :][: size * groups].view(groups, size)
            code = codes[start * bits // 8 :][: groups * -(-width * bits // 8)]
            parts.append(self.format.dequantize(head, unpack(code.view(groups, -1), bits, width)))
        return (
            torch.cat([part.flatten() for part in parts]) if parts else codes.new_empty(0).float()
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
        if residual is None or kept is None:
            check_floats(x=x)
        else:
            check_floats(x=x, residual=residual, kept=kept)
        self._check(payload, group, x)
        if not self._compiled(x):
            triton = self._on_gpu(x)
            encode = triton.encode if triton else self.encode_reference
            encode(x, residual, kept, group, k0, k1, payload)
            return
        before, after = (None if each is None else each.data_ptr() for each in (residual, kept))
        n, source, target = x.numel(), x.data_ptr(), payload.data_ptr()

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
            triton = self._on_gpu(out)
            decode = triton.decode if triton else self.decode_reference
            decode(payloads, group, out, alpha, add)
            return
        n, count, target = out.numel(), len(payloads), out.data_ptr()
        sources = (ctypes.c_void_p * count)(*(payload.data_ptr() for payload in payloads))

        def part(start: int, stop: int) -> None:
            self._c_decode(sources, count, n, group, start, stop, alpha, add, target)

        for_ranges(n, group, part)

    def _compiled(self, values: Tensor) -> bool:
        return self.format.compiled and native.compiled(values)

    def _on_gpu(self, values: Tensor) -> Any:
        """Return the Triton kernels of the format, where there are some for these values."""
        kernels = triton_kernels(values)
        return kernels.formats.FORMATS.get(self.format.name) if kernels else None

    def _check(self, payload: Tensor, group: int, values: Tensor) -> None:
        if group % 8 or not 8 <= group <= _LARGEST_GROUP:
            raise ValueError(f"group must be a multiple of 8 from 8 to 4096 (found {group})")
        check_payload(payload, self.payload_bytes(values.numel(), group), values)
