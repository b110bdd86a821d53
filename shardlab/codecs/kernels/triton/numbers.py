"""Numbers of the formats in Triton, each with the bits of its PyTorch reference.

A `triton.language` division or root rounds once only by its name `_rn`, as the references do.
"""

import triton
import triton.language as tl


@triton.jit
def random_bits(element, k0, k1):
    """Return 32 bits for each of the elements (uint32), uint32: shardlab/codecs/kernels/random.py."""
    x = element * 0x9E3779B9 + k0.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15) ^ k1.to(tl.uint32)) * 0x735A2D97
    return x ^ (x >> 15)


@triton.jit
def float_of(bits):
    """Return float32 from its bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(value):
    """Return the bits of float32, int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def widened(word):
    """Return float32 from the bits of bfloat16."""
    return float_of(word << 16)


@triton.jit
def nearest_bf16(bits):
    """Return the bits of bfloat16 nearest to finite float32 bits, ties to even."""
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def nearest_integer(value):
    """Round a float of small magnitude to the nearest integer, ties to even."""
    # 1.5 * 2**23 has no fraction bits: adding it rounds, and leaves the integer in the low bits
    return bits_of(value + 12582912.0)


@triton.jit
def largest_of(given):
    """Return the bits of the largest magnitude of each group [ROWS, PLANES, WIDTH], int32."""
    return tl.max(tl.max(bits_of(given) & 0x7FFFFFFF, axis=2), axis=1)


@triton.jit
def divided(values, divisor):
    """Return values / divisor, rounded once."""
    return tl.div_rn(values, tl.full(values.shape, 1.0, tl.float32) * divisor)


@triton.jit
def scale_bits(largest, scale, TOO_LARGE: tl.constexpr):
    """Return the bits of bfloat16 scales: `_words` of shardlab/codecs/kernels/scales.py.

    Args:
        largest: bits of the largest magnitude of the group.
        TOO_LARGE: bits of the smallest magnitude that counts as not finite.
    """
    word = (bits_of(tl.maximum(scale, 1.1754943508222875e-38)) + 0xFFFF) >> 16
    word = tl.where(largest == 0, 0, word)
    return tl.where(largest >= TOO_LARGE, 0x7FC0, word)


@triton.jit
def scale_word(largest, levels, smallest):
    """Return the scales that make the largest magnitude the code `levels`: `scale_words`."""
    scale = tl.maximum(divided(float_of(largest), levels), smallest)
    return scale_bits(largest, scale, 0x7F000000)


@triton.jit
def is_usable(word):
    """Return whether a scale is neither 0 nor NaN."""
    return (word != 0) & (word != 0x7FC0)


@triton.jit
def usable_scale(word):
    """Return the scale as float32; 1 where there is none."""
    return tl.where(is_usable(word), widened(word), 1.0)


@triton.jit
def steps_of(given, word):
    """Return given / scale, by the scale's reciprocal; 0 where there is no scale."""
    scale = usable_scale(word)
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    return tl.where(is_usable(word), given, 0.0) * reciprocal


@triton.jit
def given_at(x, residual, place, inside, RESIDUAL: tl.constexpr):
    """Return the elements of x, or of x + residual, at the places; 0 outside."""
    given = tl.load(x + place, mask=inside, other=0.0)
    if RESIDUAL:
        given = given + tl.load(residual + place, mask=inside, other=0.0)
    return given


@triton.jit
def folded(lanes):
    """Add the upper half of the lanes [ROWS, 16 or 32] to the lower, until one is left."""
    rows: tl.constexpr = lanes.shape[0]
    # by pairs, so that the order of a reduction has no effect
    if lanes.shape[1] == 32:
        lanes = tl.sum(lanes.reshape(rows, 2, 16), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 8), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 4), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 2), axis=1)
    return tl.sum(lanes, axis=1)
