"""Grouped formats (`shardlab.kernels.grouped`) in Triton: same payloads, bit for bit.

One program takes ROWS groups. A group is a tile [PLANES, WIDTH]: in the payload, byte j of a group
holds elements j, j + m, j + 2 m, ... of its m bytes, so planes are packed by shifts alone. A
format is three functions that Triton compiles into the kernels: `head` (the word of a group),
`code` and `value`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 2048
"""elements of a program: enough to keep a multiprocessor busy, few enough for its registers"""


# keys differ from message to message: kernels for special numbers would be compiled in training
@triton.jit(do_not_specialize=["k0", "k1"])
def _encode_kernel(
    x,
    residual,
    kept,
    payload,
    groups,
    group,
    head_offset,
    code_offset,
    first_element,
    k0,
    k1,
    HEAD: tl.constexpr,
    CODE: tl.constexpr,
    VALUE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode groups of `group` elements each; the shorter last one has a launch for itself."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    width = (group * BITS + 7) // 8 if BITS < 8 else group
    position = plane * width + column
    inside = (row < groups) & (column < width) & (position < group)
    element = first_element + row * group + position
    given = tl.load(x + element, mask=inside, other=0.0)
    if RESIDUAL:
        before = tl.load(residual + element, mask=inside, other=0.0)
        given = given + before
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = first_element + line * group
    word = HEAD(given, x, residual, start, line < groups, group, RESIDUAL)
    heads = (payload + head_offset).to(tl.pointer_type(tl.int16))
    tl.store(heads + line, word.to(tl.int16), mask=line < groups)
    word = word[:, None, None]
    code = CODE(given, word, element.to(tl.uint32), k0, k1)
    packed = tl.sum(tl.where(inside, code & ((1 << BITS) - 1), 0) << (BITS * plane), axis=1)
    line = line[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    tl.store(
        payload + code_offset + line * width + column,
        packed.to(tl.uint8),
        mask=(line < groups) & (column < width),
    )
    if RESIDUAL:
        rest = given - VALUE(code & ((1 << BITS) - 1), word)
        finite = tl.abs(rest) < float("inf")
        tl.store(kept + element, tl.where(finite, rest, before), mask=inside)


@triton.jit
def _decode_kernel(
    payloads,
    out,
    alpha,
    count,
    groups,
    group,
    head_offset,
    code_offset,
    first_element,
    VALUE: tl.constexpr,
    ADD: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    width = (group * BITS + 7) // 8 if BITS < 8 else group
    position = plane * width + column
    inside = (row < groups) & (column < width) & (position < group)
    total = tl.zeros([ROWS, PLANES, WIDTH], tl.float32)
    for index in range(count):
        payload = tl.load(payloads + index).to(tl.pointer_type(tl.uint8))
        words = (payload + head_offset).to(tl.pointer_type(tl.int16))
        word = tl.load(words + row, mask=row < groups, other=0).to(tl.int32) & 0xFFFF
        packed = tl.load(payload + code_offset + row * width + column, mask=inside, other=0)
        code = (packed.to(tl.int32) >> (BITS * plane)) & ((1 << BITS) - 1)
        value = VALUE(code, word)
        total = tl.where(index == 0, value, total + value)
    element = first_element + row * group + position
    if ADD:
        before = tl.load(out + element, mask=inside, other=0.0)
        tl.store(out + element, before + total * alpha, mask=inside)
    else:
        tl.store(out + element, total * alpha, mask=inside)


class TritonFormat(NamedTuple):
    """Functions of one format whose head is one word of 16 bits, and its kernels."""

    bits: int
    head: Any
    """(given [ROWS, PLANES, WIDTH] with zeros beyond the group; x, residual, start [ROWS], inside
    [ROWS], group, whether there is a residual: to read them in another order) -> int32 [ROWS]"""
    code: Any
    """(given, words [ROWS, 1, 1], elements: their numbers in the message, k0, k1) -> int32 codes"""
    value: Any
    """(codes, words) -> float32"""

    def encode(
        self,
        x: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        group: int,
        k0: int,
        k1: int,
        payload: Tensor,
    ) -> None:
        """Run the operator `NAME_encode` of `shardlab.kernels.grouped` on the GPU."""
        for span in _spans(x.numel(), group, self.bits):
            _encode_kernel[(triton.cdiv(span.groups, span.rows),)](
                x,
                x if residual is None else residual,
                x if kept is None else kept,
                payload,
                span.groups,
                span.group,
                span.head_offset,
                span.code_offset,
                span.first_element,
                _signed(k0),
                _signed(k1),
                HEAD=self.head,
                CODE=self.code,
                VALUE=self.value,
                RESIDUAL=residual is not None,
                BITS=self.bits,
                **span.tile(),
                # a fused multiply-add rounds once where the specification rounds twice
                enable_fp_fusion=False,
            )

    def decode(
        self,
        payloads: Sequence[Tensor],
        group: int,
        out: Tensor,
        alpha: float,
        add: bool,
    ) -> None:
        """Run the operator `NAME_decode` of `shardlab.kernels.grouped` on the GPU."""
        addresses = _addresses(tuple(each.data_ptr() for each in payloads), out.device)
        for span in _spans(out.numel(), group, self.bits):
            _decode_kernel[(triton.cdiv(span.groups, span.rows),)](
                addresses,
                out,
                alpha,
                len(payloads),
                span.groups,
                span.group,
                span.head_offset,
                span.code_offset,
                span.first_element,
                VALUE=self.value,
                ADD=add,
                BITS=self.bits,
                **span.tile(),
                enable_fp_fusion=False,
            )


def _signed(word: int) -> int:
    """Return 32 bits as a signed number, so that all keys have one type in a kernel."""
    return word - (word >> 31 << 32)


@lru_cache(4096)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return a table on the device; buffers are reused, so a step copies what it did not before."""
    return torch.tensor(pointers, device=device)


class _Span(NamedTuple):
    """Groups of equal length in a message: all full ones, or the shorter last one."""

    groups: int
    group: int
    head_offset: int
    code_offset: int
    first_element: int
    bits: int

    @property
    def rows(self) -> int:
        return max(1, _TILE // triton.next_power_of_2(self.group))

    def tile(self) -> dict[str, int]:
        """Return the sizes of a program's tile, powers of two."""
        planes = max(1, 8 // self.bits)
        width = -(-self.group // planes)
        return {"ROWS": self.rows, "PLANES": planes, "WIDTH": triton.next_power_of_2(width)}


def _spans(n: int, group: int, bits: int) -> list[_Span]:
    full, rest = divmod(n, group)
    border = 2 * (full + (rest > 0))
    spans = [_Span(full, group, 0, border, 0, bits)] if full else []
    if rest:
        first = full * group
        spans.append(_Span(1, rest, 2 * full, border + first * bits // 8, first, bits))
    return spans
