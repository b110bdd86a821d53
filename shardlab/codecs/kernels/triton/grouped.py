"""Grouped formats (`shardlab.codecs.kernels.grouped`) in Triton: same payloads, bit for bit.

One program takes ROWS groups. A group is a tile [PLANES, WIDTH]: in the payload, byte j of a group
holds elements j, j + m, j + 2 m, ... of its m bytes, so planes are packed by shifts alone. A
format is three functions that Triton compiles into the kernels: `head` (the word of a group),
`code` and `value`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from shardlab.codecs.kernels.triton.launch import addresses, signed, spans


@triton.jit
def _sizes(group, BITS: tl.constexpr):
    """Return the columns of a group's tile, and the bytes of its codes."""
    columns = (group * (BITS % 8) + 7) // 8 if BITS % 8 else group
    return columns, group * (BITS // 8) + (columns if BITS % 8 else 0)


# keys differ from message to message: kernels for special numbers would be compiled in training
@triton.jit(do_not_specialize=["k0", "k1"])
def _encode_kernel(
    x,
    residual,
    kept,
    heads,
    codes,
    groups,
    group,
    first_group,
    first_element,
    first_byte,
    k0,
    k1,
    HEAD: tl.constexpr,
    CODE: tl.constexpr,
    VALUE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    KEEP: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Encode groups of `group` elements each; the shorter last one has a launch for itself."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    width, stride = _sizes(group, BITS)
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
    if HEAD_BYTES == 2:
        target = heads.to(tl.pointer_type(tl.int16)) + first_group + line
        tl.store(target, word.to(tl.int16), mask=line < groups)
    if HEAD_BYTES == 4:
        target = heads.to(tl.pointer_type(tl.int32)) + first_group + line
        tl.store(target, word, mask=line < groups)
    word = word[:, None, None]
    code = CODE(given, word, element.to(tl.uint32), k0, k1) & ((1 << BITS) - 1)
    codes += first_byte
    if BITS == 16:
        target = codes.to(tl.pointer_type(tl.int16)) + row * group + position
        tl.store(target, code.to(tl.int16), mask=inside)
    elif BITS >= 8:
        tl.store(codes + row * stride + position, code.to(tl.uint8), mask=inside)
    if BITS % 8:
        high = code >> 8 if BITS > 8 else code
        packed = tl.sum(tl.where(inside, high, 0) << (BITS % 8 * plane), axis=1)
        line = line[:, None]
        column = tl.arange(0, WIDTH)[None, :]
        tl.store(
            codes + line * stride + (stride - width) + column,
            packed.to(tl.uint8),
            mask=(line < groups) & (column < width),
        )
    if KEEP:
        rest = given - VALUE(code, word)
        finite = tl.abs(rest) < float("inf")
        # `kept` may be the residual, which a head reads in other threads than these
        tl.debug_barrier()
        tl.store(kept + element, tl.where(finite, rest, before), mask=inside)


@triton.jit
def codes_at(codes, row, plane, position, inside, group, BITS: tl.constexpr):
    """Return the codes of elements at a position of each row, int32."""
    width, stride = _sizes(group, BITS)
    if BITS == 16:
        source = codes.to(tl.pointer_type(tl.int16)) + row * group + position
        code = tl.load(source, mask=inside, other=0).to(tl.int32)
    elif BITS == 8:
        code = tl.load(codes + row * stride + position, mask=inside, other=0).to(tl.int32)
    else:
        source = codes + row * stride + (stride - width) + position - plane * width
        packed = tl.load(source, mask=inside, other=0).to(tl.int32)
        code = (packed >> (BITS % 8 * plane)) & ((1 << BITS % 8) - 1)
        if BITS == 9:
            low = tl.load(codes + row * stride + position, mask=inside, other=0)
            code = code << 8 | low.to(tl.int32)
    return code & ((1 << BITS) - 1)


@triton.jit
def _decode_kernel(
    payloads,
    out,
    alpha,
    count,
    border,
    groups,
    group,
    first_group,
    first_element,
    first_byte,
    VALUE: tl.constexpr,
    ADD: tl.constexpr,
    HEAD_BYTES: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    PLANES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None]
    plane = tl.arange(0, PLANES)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    width, _ = _sizes(group, BITS)
    position = plane * width + column
    inside = (row < groups) & (column < width) & (position < group)
    total = tl.zeros([ROWS, PLANES, WIDTH], tl.float32)
    word = tl.zeros([ROWS, 1, 1], tl.int32)
    for index in range(count):
        payload = tl.load(payloads + index).to(tl.pointer_type(tl.uint8))
        if HEAD_BYTES == 2:
            source = payload.to(tl.pointer_type(tl.int16)) + first_group + row
            word = tl.load(source, mask=row < groups, other=0).to(tl.int32) & 0xFFFF
        if HEAD_BYTES == 4:
            source = payload.to(tl.pointer_type(tl.int32)) + first_group + row
            word = tl.load(source, mask=row < groups, other=0)
        code = codes_at(payload + border + first_byte, row, plane, position, inside, group, BITS)
        value = VALUE(code, word)
        total = tl.where(index == 0, value, total + value)
    element = first_element + row * group + position
    if ADD:
        before = tl.load(out + element, mask=inside, other=0.0)
        tl.store(out + element, before + total * alpha, mask=inside)
    else:
        tl.store(out + element, total * alpha, mask=inside)


class TritonFormat(NamedTuple):
    """Functions of one format, and its kernels."""

    head_bytes: int
    bits: int
    head: Any
    """(given [ROWS, PLANES, WIDTH] with zeros beyond the group; x, residual, start [ROWS], inside
    [ROWS], group, whether there is a residual: to read them in another order) -> int32 [ROWS], of
    which `head_bytes` are sent"""
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
        """Run the operator `NAME_encode` of `shardlab.codecs.kernels.grouped` on the GPU."""
        border = self.head_bytes * triton.cdiv(x.numel(), group)
        self.write(x, residual, kept, group, (k0, k1), payload, payload[border:])

    def write(
        self,
        x: Tensor,
        residual: Tensor | None,
        kept: Tensor | None,
        group: int,
        key: tuple[int, int],
        heads: Tensor,
        codes: Tensor,
    ) -> None:
        """Write heads and codes to two buffers; keep no rest if `kept` is None."""
        k0, k1 = map(signed, key)
        for span in spans(x.numel(), group, self.bits):
            _encode_kernel[span.grid](
                x,
                x if residual is None else residual,
                x if kept is None else kept,
                heads,
                codes,
                *span.where(),
                k0,
                k1,
                HEAD=self.head,
                CODE=self.code,
                VALUE=self.value,
                RESIDUAL=residual is not None,
                KEEP=kept is not None,
                HEAD_BYTES=self.head_bytes,
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
        """Run the operator `NAME_decode` of `shardlab.codecs.kernels.grouped` on the GPU."""
        for span in spans(out.numel(), group, self.bits):
            _decode_kernel[span.grid](
                addresses(payloads),
                out,
                alpha,
                len(payloads),
                self.head_bytes * triton.cdiv(out.numel(), group),
                *span.where(),
                VALUE=self.value,
                ADD=add,
                HEAD_BYTES=self.head_bytes,
                BITS=self.bits,
                **span.tile(),
                enable_fp_fusion=False,
            )
