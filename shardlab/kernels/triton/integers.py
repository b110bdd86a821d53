"""Integer formats (shardlab/kernels/integers.py) for `shardlab.kernels.triton.grouped`."""

import triton
import triton.language as tl

from shardlab.kernels.triton.grouped import TritonFormat
from shardlab.kernels.triton.random import random_bits


@triton.jit
def largest_of(given):
    """Bits of the largest magnitude of each group, int32 [ROWS]."""
    magnitude = given.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(magnitude, axis=2), axis=1)


@triton.jit
def scale_word(largest, levels):
    """Bits of bfloat16 scales: `scale_words` of shardlab/kernels/scales.py."""
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), levels)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    word = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    word = tl.where(largest == 0, 0, word)
    return tl.where(largest >= 0x7F000000, 0x7FC0, word)


@triton.jit
def widened(word):
    """float32 from the bits of bfloat16."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _is_usable(word):
    return (word != 0) & (word != 0x7FC0)


@triton.jit
def _steps(given, word):
    """given / scale; 0 where there is no scale."""
    scale = tl.where(_is_usable(word), widened(word), 1.0)
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(_is_usable(word), given, 0.0) * reciprocal


@triton.jit
def _integer(value):
    """A float of small magnitude, rounded to the nearest integer, ties to even."""
    # 1.5 * 2**23 has no fraction bits: adding it rounds, and leaves the integer in the low bits
    return (value + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _drawn(steps, top, element, k0, k1):
    """floor(steps + random), with 24 bits after the point."""
    fixed = (steps * 16777216.0).to(tl.int32)
    chance = (random_bits(element, k0, k1) >> 8).to(tl.int32)
    return (tl.minimum(fixed, top << 24) + chance) >> 24


@triton.jit
def _head127(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 127.0)


@triton.jit
def _head7(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 7.0)


@triton.jit
def _head8(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Negative where the largest magnitude is that of a positive element."""
    largest = largest_of(given)
    word = scale_word(largest, 8.0)
    highest = tl.max(tl.max(given, axis=2), axis=1)
    flipped = _is_usable(word) & (highest == largest.to(tl.float32, bitcast=True))
    return tl.where(flipped, word | 0x8000, word)


@triton.jit
def _code8(given, word, element, k0, k1):
    return _integer(tl.minimum(_steps(given, word), 127.0))


@triton.jit
def _code8_drawn(given, word, element, k0, k1):
    return _drawn(_steps(given, word), 127, element, k0, k1)


@triton.jit
def _code4(given, word, element, k0, k1):
    return _integer(tl.minimum(_steps(given, word), 7.0)) + 8


@triton.jit
def _code4_drawn(given, word, element, k0, k1):
    return _drawn(_steps(given, word), 7, element, k0, k1) + 8


@triton.jit
def _value8(code, word):
    return ((code << 24) >> 24).to(tl.float32) * widened(word)


@triton.jit
def _value4(code, word):
    return (code - 8).to(tl.float32) * widened(word)


INT8 = TritonFormat(8, _head127, _code8, _value8)
INT8_STOCHASTIC = TritonFormat(8, _head127, _code8_drawn, _value8)
INT4 = TritonFormat(4, _head8, _code4, _value4)
INT4_STOCHASTIC = TritonFormat(4, _head7, _code4_drawn, _value4)
