"""Formats of shardlab/codecs/kernels/integers.py as functions of `shardlab.codecs.kernels.triton.grouped`."""

import triton
import triton.language as tl

from shardlab.codecs.kernels.levels import NF4
from shardlab.codecs.kernels.triton.numbers import (
    divided,
    float_of,
    folded,
    given_at,
    is_usable,
    largest_of,
    nearest_integer,
    random_bits,
    scale_bits,
    scale_word,
    steps_of,
    widened,
)

_LEVELS = tl.constexpr(NF4)
_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def head1(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 1.0, _SMALLEST)


@triton.jit
def head7(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 7.0, _SMALLEST)


@triton.jit
def head127(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 127.0, _SMALLEST)


@triton.jit
def signed_head8(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Return the scales, negative where the largest element is positive."""
    largest = largest_of(given)
    word = scale_word(largest, 8.0, _SMALLEST)
    highest = tl.max(tl.max(given, axis=2), axis=1)
    return tl.where(is_usable(word) & (highest == float_of(largest)), word | 0x8000, word)


@triton.jit
def _norm_word(given, x, residual, start, inside, group, levels, RESIDUAL: tl.constexpr):
    """Return the scales that make the norm the code `levels`: `norm_words` of scales.py."""
    largest = largest_of(given)
    exponent = tl.minimum(tl.maximum(largest >> 23, 1), 253)
    shrink = float_of((254 - exponent) << 23)
    lane = tl.arange(0, 16)[None, :]
    plain = tl.zeros([start.shape[0], 16], tl.float32)
    shrunk = tl.zeros([start.shape[0], 16], tl.float32)
    for begin in range(0, group, 16):
        wanted = inside[:, None] & (begin + lane < group)
        part = given_at(x, residual, start[:, None] + begin + lane, wanted, RESIDUAL)
        near = part * shrink[:, None]
        plain += part * part
        shrunk += near * near
    squares = folded(plain)
    good = (squares >= 8.673617379884035e-19) & (squares < 1.2676506002282294e30)
    root = tl.sqrt_rn(tl.where(good, squares, folded(shrunk)))
    grow = tl.where(good, 1.0, float_of(exponent << 23))
    return scale_bits(largest, divided(root, levels) * grow, 0x7B800000)


@triton.jit
def norm1(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return _norm_word(given, x, residual, start, inside, group, 1.0, RESIDUAL)


@triton.jit
def norm7(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return _norm_word(given, x, residual, start, inside, group, 7.0, RESIDUAL)


@triton.jit
def norm127(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return _norm_word(given, x, residual, start, inside, group, 127.0, RESIDUAL)


@triton.jit
def code8(given, word, element, k0, k1):
    return nearest_integer(tl.minimum(steps_of(given, word), 127.0))


@triton.jit
def code4(given, word, element, k0, k1):
    return nearest_integer(tl.minimum(steps_of(given, word), 7.0)) + 8


@triton.jit
def _drawn(steps, top, element, k0, k1):
    """Return floor(steps + random), with 24 bits after the point."""
    fixed = (steps * 16777216.0).to(tl.int32)
    chance = (random_bits(element, k0, k1) >> 8).to(tl.int32)
    return (tl.minimum(fixed, top << 24) + chance) >> 24


@triton.jit
def drawn8(given, word, element, k0, k1):
    return _drawn(steps_of(given, word), 127, element, k0, k1)


@triton.jit
def drawn4(given, word, element, k0, k1):
    return _drawn(steps_of(given, word), 7, element, k0, k1) + 8


@triton.jit
def drawn2(given, word, element, k0, k1):
    return _drawn(steps_of(given, word), 1, element, k0, k1) + 2


@triton.jit
def value8(code, word):
    return ((code << 24) >> 24).to(tl.float32) * widened(word)


@triton.jit
def value4(code, word):
    return (code - 8).to(tl.float32) * widened(word)


@triton.jit
def value2(code, word):
    return (code - 2).to(tl.float32) * widened(word)


@triton.jit
def nf4_code(given, word, element, k0, k1):
    """Count the borders between levels that lie below the element."""
    steps = steps_of(given, word)
    code = tl.zeros(given.shape, tl.int32)
    for upper in tl.static_range(1, 16):
        code += (steps > (_LEVELS[upper] + _LEVELS[upper - 1]) / 2).to(tl.int32)
    return code


@triton.jit
def nf4_value(code, word):
    level = tl.zeros(code.shape, tl.float32)
    for number in tl.static_range(16):
        level = tl.where(code == number, _LEVELS[number], level)
    return level * widened(word)
