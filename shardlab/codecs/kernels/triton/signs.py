"""Formats of shardlab/codecs/kernels/signs.py as functions of `shardlab.codecs.kernels.triton.grouped`."""

import triton
import triton.language as tl

from shardlab.codecs.kernels.triton.numbers import (
    bits_of,
    divided,
    float_of,
    folded,
    given_at,
    nearest_bf16,
    widened,
)


@triton.jit
def _sums(x, residual, start, inside, group, HALF: tl.constexpr, RESIDUAL: tl.constexpr):
    """Sum a group in 32 lanes, folded: `lane_sums` of shardlab/codecs/kernels/signs.py.

    Args:
        HALF: "below" zero, "others", or "both" for magnitudes.
    """
    lane = tl.arange(0, 32)[None, :]
    lanes = tl.zeros([start.shape[0], 32], tl.float32)
    for begin in range(0, group, 32):
        wanted = inside[:, None] & (begin + lane < group)
        part = given_at(x, residual, start[:, None] + begin + lane, wanted, RESIDUAL)
        if HALF == "both":
            part = tl.abs(part)
        elif HALF == "below":
            part = tl.where(part < 0.0, part, 0.0)
        else:
            part = tl.where(part < 0.0, 0.0, part)
        lanes += part
    return folded(lanes)


@triton.jit
def _mean_word(total, count):
    """Return a mean as bfloat16: `_mean_words` of shardlab/codecs/kernels/signs.py."""
    bits = bits_of(divided(total, count))
    magnitude = bits & 0x7FFFFFFF
    word = tl.where(magnitude < 0x00800000, 0, nearest_bf16(bits) & 0xFFFF)
    return tl.where(magnitude >= 0x7F7F8000, 0x7FC0, word)


@triton.jit
def efsign_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return _mean_word(_sums(x, residual, start, inside, group, "both", RESIDUAL), group)


@triton.jit
def onebit_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Return the mean of the elements not below zero, and that of the others in the upper half."""
    below = tl.sum(tl.sum((given < 0.0).to(tl.int32), axis=2), axis=1)
    lower = _sums(x, residual, start, inside, group, "below", RESIDUAL)
    upper = _sums(x, residual, start, inside, group, "others", RESIDUAL)
    lower = _mean_word(lower, tl.maximum(below, 1).to(tl.float32))
    upper = _mean_word(upper, tl.maximum(group - below, 1).to(tl.float32))
    finite = (lower != 0x7FC0) & (upper != 0x7FC0)
    return tl.where(finite, upper | lower << 16, 0x7FC07FC0)


@triton.jit
def sum_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Return the bits of the sum of magnitudes."""
    return bits_of(_sums(x, residual, start, inside, group, "both", RESIDUAL))


@triton.jit
def sign_code(given, word, element, k0, k1):
    return (given < 0.0).to(tl.int32)


@triton.jit
def efsign_value(code, word):
    magnitude = widened(word)
    # a mean of zero has no sign
    return tl.where(code == 1, 0.0 - magnitude, magnitude)


@triton.jit
def onebit_value(code, word):
    return tl.where(code == 1, float_of(word & -0x10000), widened(word))
