"""Formats with Triton kernels, by the name of `shardlab.kernels.grouped.Format`."""

import triton
import triton.language as tl

from shardlab.kernels.triton.grouped import TritonFormat


@triton.jit
def _random_bits(element, k0, k1):
    """Return 32 bits for each of the elements (uint32), uint32: shardlab/kernels/random.py."""
    x = element * 0x9E3779B9 + k0.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ k1.to(tl.uint32)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def _largest_of(given):
    """Return the bits of the largest magnitude of each group, int32 [ROWS]."""
    magnitude = given.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.max(magnitude, axis=2), axis=1)


@triton.jit
def _scale_word(largest, levels):
    """Return the bits of bfloat16 scales: `scale_words` of shardlab/kernels/scales.py."""
    scale = tl.div_rn(largest.to(tl.float32, bitcast=True), levels)
    scale = tl.maximum(scale, 1.1754943508222875e-38)
    word = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16
    word = tl.where(largest == 0, 0, word)
    return tl.where(largest >= 0x7F000000, 0x7FC0, word)


@triton.jit
def _widened(word):
    """Return float32 from the bits of bfloat16."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def _is_usable(word):
    return (word != 0) & (word != 0x7FC0)


@triton.jit
def _steps(given, word):
    """Return given / scale; 0 where there is no scale."""
    scale = tl.where(_is_usable(word), _widened(word), 1.0)
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(_is_usable(word), given, 0.0) * reciprocal


@triton.jit
def _integer(value):
    """Round a float of small magnitude to the nearest integer, ties to even."""
    # 1.5 * 2**23 has no fraction bits: adding it rounds, and leaves the integer in the low bits
    return (value + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def _drawn(steps, top, element, k0, k1):
    """Return floor(steps + random), with 24 bits after the point."""
    fixed = (steps * 16777216.0).to(tl.int32)
    chance = (_random_bits(element, k0, k1) >> 8).to(tl.int32)
    return (tl.minimum(fixed, top << 24) + chance) >> 24


@triton.jit
def _head127(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return _scale_word(_largest_of(given), 127.0)


@triton.jit
def _head7(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return _scale_word(_largest_of(given), 7.0)


@triton.jit
def _head8(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Return the scales, negative where the largest element is positive."""
    largest = _largest_of(given)
    word = _scale_word(largest, 8.0)
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
    return ((code << 24) >> 24).to(tl.float32) * _widened(word)


@triton.jit
def _value4(code, word):
    return (code - 8).to(tl.float32) * _widened(word)


@triton.jit
def _given(x, residual, place, inside, RESIDUAL: tl.constexpr):
    given = tl.load(x + place, mask=inside, other=0.0)
    if RESIDUAL:
        given = given + tl.load(residual + place, mask=inside, other=0.0)
    return given


@triton.jit
def _magnitudes(x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Sum magnitudes in 32 lanes, folded: `lane_sums` of shardlab/kernels/signs.py."""
    lane = tl.arange(0, 32)[None, :]
    rows: tl.constexpr = start.shape[0]
    lanes = tl.zeros([rows, 32], tl.float32)
    for begin in range(0, group, 32):
        wanted = inside[:, None] & (begin + lane < group)
        lanes += tl.abs(_given(x, residual, start[:, None] + begin + lane, wanted, RESIDUAL))
    # pairs, so that the order of a reduction has no effect
    lanes = tl.sum(lanes.reshape(rows, 2, 16), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 8), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 4), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 2), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def _head_mean(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Return the mean magnitude as bfloat16: `_mean_words` of shardlab/kernels/signs.py."""
    total = _magnitudes(x, residual, start, inside, group, RESIDUAL)
    mean = tl.div_rn(total, tl.full(total.shape, 1.0, tl.float32) * group)
    bits = mean.to(tl.int32, bitcast=True)
    word = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    word = tl.where(bits < 0x00800000, 0, word)
    return tl.where(bits >= 0x7F7F8000, 0x7FC0, word)


@triton.jit
def _code_sign(given, word, element, k0, k1):
    return (given < 0.0).to(tl.int32)


@triton.jit
def _value_sign(code, word):
    magnitude = _widened(word)
    return tl.where(code == 1, -magnitude, magnitude)


FORMATS = {
    "int8": TritonFormat(8, _head127, _code8, _value8),
    "int8_stochastic": TritonFormat(8, _head127, _code8_drawn, _value8),
    "int4": TritonFormat(4, _head8, _code4, _value4),
    "int4_stochastic": TritonFormat(4, _head7, _code4_drawn, _value4),
    "efsign": TritonFormat(1, _head_mean, _code_sign, _value_sign),
}
