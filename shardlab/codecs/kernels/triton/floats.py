"""Formats of shardlab/codecs/kernels/floats.py and float8.py for `shardlab.codecs.kernels.triton.grouped`."""

import triton
import triton.language as tl

from shardlab.codecs.kernels.triton.numbers import (
    bits_of,
    float_of,
    is_usable,
    largest_of,
    nearest_bf16,
    random_bits,
    scale_word,
    steps_of,
    usable_scale,
    widened,
)


@triton.jit
def no_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return tl.zeros(start.shape, tl.int32)


@triton.jit
def bf16_code(given, word, element, k0, k1):
    bits = bits_of(given)
    return tl.where(given != given, (bits >> 16) | 0x0040, nearest_bf16(bits))


@triton.jit
def bf16_value(code, word):
    return widened(code)


@triton.jit
def fp16_code(given, word, element, k0, k1):
    bits = bits_of(given)
    quiet = ((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x03FF)
    number = tl.where(given != given, 0.0, given)
    clipped = tl.minimum(tl.maximum(number, -65504.0), 65504.0)
    infinite = (bits & 0x7FFFFFFF) == 0x7F800000
    half = tl.where(infinite, given, clipped).to(tl.float16).to(tl.int16, bitcast=True)
    return tl.where(given != given, quiet, half.to(tl.int32))


@triton.jit
def fp16_value(code, word):
    return code.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def natural_code(given, word, element, k0, k1):
    bits = bits_of(given)
    magnitude = bits & 0x7FFFFFFF
    drawn = tl.minimum(magnitude, 0x7F000000)
    drawn += (random_bits(element, k0, k1) >> 9).to(tl.int32)
    return tl.where(magnitude > 0x7F000000, 255, drawn >> 23) | ((bits >> 31) & 1) << 8


@triton.jit
def natural_value(code, word):
    return float_of(code << 23)


@triton.jit
def _float8(number, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round to a float of 8 bits, none above its largest; not by `to`: sm_80 has no e4m3."""
    bits = bits_of(number)
    magnitude = bits & 0x7FFFFFFF
    cut: tl.constexpr = 23 - MANTISSA
    normal = (magnitude + ((1 << (cut - 1)) - 1) + ((magnitude >> cut) & 1)) >> cut
    normal -= (127 - BIAS) << MANTISSA
    # the last bit of this sum is the step of subnormal codes
    near: tl.constexpr = 127 + cut - (BIAS - 1)
    subnormal = bits_of(float_of(magnitude) + float_of(tl.full([], near << 23, tl.int32)))
    is_normal = magnitude >= (127 + 1 - BIAS) << 23
    return tl.where(is_normal, normal, subnormal - (near << 23)) | ((bits >> 24) & 0x80)


@triton.jit
def _widened8(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    # a subnormal code is a subnormal float32 before the exponents are aligned, exactly
    magnitude = float_of((code & 0x7F) << (23 - MANTISSA))
    magnitude *= float_of(tl.full([], (254 - BIAS) << 23, tl.int32))
    return float_of(bits_of(magnitude) | (code & 0x80) << 24)


@triton.jit
def e4m3_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 448.0, 2.0**-116)


@triton.jit
def e4m3_code(given, word, element, k0, k1):
    return _float8(steps_of(given, word), 3, 7)


@triton.jit
def e4m3_value(code, word):
    return _widened8(code, 3, 7) * widened(word)


@triton.jit
def e5m2_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 57344.0, 2.0**-109)


@triton.jit
def e5m2_code(given, word, element, k0, k1):
    return _float8(steps_of(given, word), 2, 15)


@triton.jit
def e5m2_value(code, word):
    return _widened8(code, 2, 15) * widened(word)


@triton.jit
def dynamic8_head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    return scale_word(largest_of(given), 1.0, 2.0**-104)


@triton.jit
def dynamic8_code(given, word, element, k0, k1):
    scale = usable_scale(word)
    factor = tl.div_rn(tl.full(scale.shape, 64.0, tl.float32), scale)
    scaled = tl.where(is_usable(word), given, 0.0) * factor
    magnitude = tl.abs(scaled)
    slope = tl.full(given.shape, 5.0**6 / 0.9, tl.float32)
    n = tl.full(given.shape, 1.0, tl.float32)
    for after in tl.static_range(6):
        # decades from the smallest: 10**-5 to 1, of 2 to 64 levels
        above = magnitude >= 6.4 * (1 + 1.8 / 2.0 ** (1 + after)) * 10.0 ** (after - 5)
        slope = tl.where(above, 5.0 ** (5 - after) / 0.9, slope)
        n = tl.where(above, 2.0 ** (1 + after), n)
    position = magnitude * slope + n * (8 / 9)
    code = tl.minimum(position, 2 * n - 0.5).to(tl.int32)
    both = tl.where(scaled < 0, code + 128, tl.where(magnitude >= 63.775, 128, code))
    return tl.where(magnitude < 64 * 2.75e-7, 0, both)


@triton.jit
def dynamic8_value(code, word):
    # level i of n of decade d: (2 n + 9 (2 i + 1)) / (2 n 10**(d + 1)); all these are exact
    low = code & 0x7F
    n = tl.full(code.shape, 1, tl.int32)
    divisor = tl.full(code.shape, 256 * 5.0**7, tl.float32)
    for after in tl.static_range(1, 7):
        above = low >= 1 << after
        n = tl.where(above, 1 << after, n)
        divisor = tl.where(above, 256 * 5.0 ** (7 - after), divisor)
    level = tl.div_rn((18 * low - 16 * n + 9).to(tl.float32), divisor)
    level = tl.where(low == 0, tl.where(code == 0, 0.0, 1.0), level)
    return tl.where(code > 128, 0.0 - level, level) * widened(word)
