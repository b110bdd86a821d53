"""`int8` (shardlab/kernels/int8.py) for `shardlab.kernels.triton.grouped`."""

import triton
import triton.language as tl

from shardlab.kernels.triton.grouped import TritonFormat


@triton.jit
def scale_word(given, group, levels):
    """Bits of the bfloat16 scales, int32 [ROWS]: `scale_words` of shardlab/kernels/int8.py."""
    magnitude = given.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(tl.max(magnitude, axis=2), axis=1)
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
def nearest(given, word):
    """given / scale rounded to the nearest integer, ties to even; 0 where there is no scale."""
    usable = (word != 0) & (word != 0x7FC0)
    scale = tl.where(usable, widened(word), 1.0)
    reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    # 1.5 * 2**23 has no fraction bits: adding it rounds, and leaves the integer in the low bits
    code = (given * reciprocal + 12582912.0).to(tl.int32, bitcast=True)
    return tl.where(usable, code, 0)


@triton.jit
def _head(given, group):
    return scale_word(given, group, 127.0)


@triton.jit
def _code(given, word, element, k0, k1):
    return nearest(given, word)


@triton.jit
def _value(code, word):
    return ((code << 24) >> 24).to(tl.float32) * widened(word)


INT8 = TritonFormat(8, _head, _code, _value)
