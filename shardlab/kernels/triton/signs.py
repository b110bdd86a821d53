"""`efsign` (shardlab/kernels/efsign.py) for `shardlab.kernels.triton.grouped`."""

import triton
import triton.language as tl

from shardlab.kernels.triton.grouped import TritonFormat
from shardlab.kernels.triton.integers import widened


@triton.jit
def _given(x, residual, place, inside, RESIDUAL: tl.constexpr):
    given = tl.load(x + place, mask=inside, other=0.0)
    if RESIDUAL:
        given = given + tl.load(residual + place, mask=inside, other=0.0)
    return given


@triton.jit
def _magnitudes(x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """Sums of magnitudes in 32 lanes, folded: `lane_sums` of shardlab/kernels/signs.py."""
    lane = tl.arange(0, 32)[None, :]
    rows: tl.constexpr = start.shape[0]
    lanes = tl.zeros([rows, 32], tl.float32)
    for begin in range(0, group, 32):
        wanted = inside[:, None] & (begin + lane < group)
        lanes += tl.abs(_given(x, residual, start[:, None] + begin + lane, wanted, RESIDUAL))
    # two numbers have one sum, whatever the order
    lanes = tl.sum(lanes.reshape(rows, 2, 16), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 8), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 4), axis=1)
    lanes = tl.sum(lanes.reshape(rows, 2, 2), axis=1)
    return tl.sum(lanes, axis=1)


@triton.jit
def _head(given, x, residual, start, inside, group, RESIDUAL: tl.constexpr):
    """The mean magnitude as bfloat16: `mean_words` of shardlab/kernels/signs.py."""
    total = _magnitudes(x, residual, start, inside, group, RESIDUAL)
    mean = tl.div_rn(total, tl.full(total.shape, 1.0, tl.float32) * group)
    bits = mean.to(tl.int32, bitcast=True)
    word = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    word = tl.where(bits < 0x00800000, 0, word)
    return tl.where(bits >= 0x7F7F8000, 0x7FC0, word)


@triton.jit
def _code(given, word, element, k0, k1):
    return (given < 0.0).to(tl.int32)


@triton.jit
def _value(code, word):
    magnitude = widened(word)
    return tl.where(code == 1, -magnitude, magnitude)


EFSIGN = TritonFormat(1, _head, _code, _value)
