"""Shorter floats: `bf16`, `fp16`, `natural`, and with a scale per group `fp8` and `dynamic8`.

Wire: docs/wire-formats.md. NaN and infinity stay what they are without a scale; with one they make
the whole group NaN, which the receiver detects in the sum.
"""

import torch
from torch import Tensor

from shardlab.codecs.grouped import GroupedCodec
from shardlab.codecs.scales import head_bytes, read_scales, scale_words, widened

_GROUP = 1024
"""elements of a group: of `natural` those whose exponents and signs are stored together, of the
others those that the kernels take at a time, which no payload shows"""


class BFloat16(GroupedCodec):
    """C(x) = x rounded to bfloat16. 16 bits per element.

    `nearest` (ties to even) is biased, its relative error at most 2^-8 per element for normal
    numbers; a contraction with delta >= 1 - 2^-16. Magnitudes above the largest bfloat16 become
    infinity.

    `stochastic` becomes one of the two neighbours, the larger magnitude with the probability that
    makes it unbiased, for subnormal numbers too; a number of bfloat16 stays what it is. Finite
    magnitudes above the largest bfloat16 become that, and these alone are biased.

    Infinity stays infinity, and NaN keeps its sign and upper payload bits. Payloads are not summed
    on the wire, since that would round once per rank.

    Args:
        rounding: `nearest` or `stochastic`.
    """

    name = "bf16"
    head_bytes = 0
    bits = 16
    kernels = True
    _LARGEST_CODE = 0x7F7F

    def __init__(self, rounding: str = "nearest") -> None:
        self.random = self.unbiased = rounding == "stochastic"
        super().__init__(_GROUP, "bf16_stochastic" if self.random else "bf16")

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        bits = rows.view(torch.int32)
        # PyTorch's own NaN differs between its vector and scalar code
        quiet = ((bits >> 16) | 0x0040).to(torch.int16)
        words = torch.where(rows.isnan(), quiet, rows.to(torch.bfloat16).view(torch.int16))
        if chance is not None:
            # 16 random bits carry into the upper half as often as the lower one is large
            raised = ((bits & 0x7FFFFFFF) + (chance * 2.0**16).to(torch.int32)) >> 16
            drawn = raised.clamp_max(self._LARGEST_CODE) | (bits >> 16 & 0x8000)
            words = torch.where(rows.isfinite(), drawn.to(torch.int16), words)
        return _no_heads(rows), words

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return codes.view(torch.bfloat16).to(torch.float32)


class Float16(GroupedCodec):
    """C(x) = x rounded to float16 (IEEE 754, binary16), to nearest even. 16 bits per element.

    Magnitudes from 65520 on become infinity, as in the hook of torch, so that a loss scaler sees
    them; the residual keeps its last value. Biased; for magnitudes from 2^-14 to 65504 the relative
    error is at most 2^-11 (a contraction with delta >= 1 - 2^-22 there), below 2^-14 it is at
    most 2^-25. Payloads are not summed on the wire, since that would round, and could overflow,
    once per rank.
    """

    name = "fp16"
    unbiased = False
    head_bytes = 0
    bits = 16
    kernels = True

    def __init__(self) -> None:
        super().__init__(_GROUP)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        bits = rows.view(torch.int32)
        quiet = (((bits >> 16) & 0x8000) | 0x7E00 | ((bits >> 13) & 0x03FF)).to(torch.int16)
        words = rows.to(torch.float16).view(torch.int16)
        return _no_heads(rows), torch.where(rows.isnan(), quiet, words)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return codes.view(torch.float16).to(torch.float32)


class Natural(GroupedCodec):
    """C(x)_i = sign(x_i) 2^e or sign(x_i) 2^(e+1), where 2^e <= |x_i| < 2^(e+1).

    The larger with probability |x_i| / 2^e - 1: unbiased, E|C(x) - x|^2 <= |x|^2 / 8 (Horvath et
    al. 2019, "Natural compression for distributed deep learning", section 2). For error feedback:
    a normal x_i is never off by more than itself. 9 bits per element. Subnormal x_i become 0
    or 2^-126, unbiased too. Magnitudes above 2^127 count as not finite and decode to infinity, as
    does NaN. Not linear: sums of powers of two are none.

    The lower 8 bits of a code are the exponent (bits of |x| + r) >> 23, where r is 23 random bits:
    a mantissa m carries into the exponent with probability m * 2**-23. The highest is the sign.
    """

    name = "natural"
    unbiased = random = True
    head_bytes = 0
    bits = 9
    kernels = True
    _LARGEST_POWER = 0x7F000000

    def __init__(self) -> None:
        super().__init__(_GROUP)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        assert chance is not None
        bits = rows.view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        carry = (chance * 2.0**23).to(torch.int32)
        exponents = (magnitude.clamp_max(self._LARGEST_POWER) + carry) >> 23
        exponents = exponents.masked_fill(magnitude > self._LARGEST_POWER, 255)
        return _no_heads(rows), exponents | (bits < 0).to(torch.int32) << 8

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        signed = torch.where(codes >= 256, codes - 512, codes).to(torch.int32)
        return ((signed & 0x1FF) << 23).view(torch.float32)


class Fp8(GroupedCodec):
    """C(x)_i = s * round(x_i / s) to the nearest 8-bit float, ties to even.

    s = max|x| / L in a group, rounded up to bfloat16, where L is the largest number of the format:
    448 of e4m3, 57344 of e5m2 (Micikevicius et al. 2022, "FP8 formats for deep learning", section
    3; the OCP 8-bit floating point specification, section 5). 8 + 16/group bits per element.
    Biased: the error of an element is at most 2^-4 |x_i| (e4m3) or 2^-3 |x_i| (e5m2), or 2^-10 s or
    2^-17 s where that is more; a contraction, since 0 is a value. Not linear: every sender has its
    own scales. A group with a value that is not finite decodes to NaN. Codes of infinity and NaN
    are never sent; what they decode to is undefined.

    Args:
        format: bits of exponent and mantissa, `e4m3` or `e5m2`.
        group: elements that share one scale.
    """

    name = "fp8"
    unbiased = False
    head_bytes = 2
    bits = 8
    kernels = True

    def __init__(self, format: str = "e4m3", group: int = 128) -> None:
        self._dtype = torch.float8_e4m3fn if format == "e4m3" else torch.float8_e5m2
        super().__init__(group, format)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        # neither a decoded value nor one that is rounded up from zero is subnormal in float32
        smallest = 2.0**-116 if self.format == "e4m3" else 2.0**-109
        words = scale_words(rows, torch.finfo(self._dtype).max, smallest)
        scale = widened(words)
        reciprocal = torch.where(scale > 0, scale, 1.0).reciprocal()
        scaled = torch.where(scale > 0, rows * reciprocal, 0.0)
        return head_bytes(words), scaled.to(self._dtype).view(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return codes.view(self._dtype).to(torch.float32) * read_scales(heads)


_POSITIVE = [
    (2 * n + 9 * (2 * i + 1)) / (2 * n * 10 ** (d + 1))
    for d, n in reversed([(d, 64 >> d) for d in range(7)])
    for i in range(n)
]
LEVELS = [0.0, *_POSITIVE, 1.0, *(-level for level in _POSITIVE)]
"""of `dynamic8` by code, in units of the scale"""
_LEVELS = torch.tensor(LEVELS)
"""a tensor, since torch.compile makes each number of a list an input"""


class Dynamic8(GroupedCodec):
    """C(x)_i = s * (the nearest of 256 levels to x_i / s), s = max|x| in a group, as bfloat16.

    Levels lie in seven decades below 1: the zeros before the first one of a code count the decade,
    what follows is a linear fraction of it (Dettmers 2016, "8-bit approximations for parallelism
    in deep learning"; also Dettmers et al. 2022, "8-bit optimizers via block-wise
    quantization", section 1.3, and normalised per group as in its section 2.1). 8 + 16/group bits
    per element. Biased: within decade d (10^-(d+1) s to 10^-d s, n = 2^(6-d) levels) the error is
    at most 0.9/n * 10^-d s; always a contraction, since 0 is a level. Not linear: every sender has
    its own scales. A group with a value that is not finite decodes to NaN.

    The nearest level is found in float32 from t = |x| * (64 / scale). Decade d begins half-way from
    the last level of the one below, at 6.4 * (1 + 1.8 / n) * 10**-d; the code is t * 5**d / 0.9 +
    n * 8/9, rounded down, at most 2 n - 1. Below half the smallest level it is 0; for positive x it
    is 128 from half-way to 1. A tie goes to the larger magnitude.

    Args:
        group: elements that share one scale.
    """

    name = "dynamic8"
    unbiased = False
    head_bytes = 2
    bits = 8
    _SMALLEST_SCALE = 2.0**-104  # no product with a level is subnormal

    def __init__(self, group: int = 256) -> None:
        super().__init__(group)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        words = scale_words(rows, 1.0, self._SMALLEST_SCALE)
        scale = widened(words)
        usable = torch.where(scale > 0, scale, 1.0)
        # by a tensor: some devices divide by a number through its reciprocal, which rounds twice
        scaled = torch.where(scale > 0, rows * (torch.full_like(usable, 64.0) / usable), 0.0)
        magnitude = scaled.abs()
        slope = torch.full_like(magnitude, 5.0**6 / 0.9)
        n = torch.ones_like(magnitude)
        for d in reversed(range(6)):
            levels = 64 >> d
            reached = magnitude >= 6.4 * (1 + 1.8 / levels) * 10.0**-d
            slope = slope.masked_fill(reached, 5.0**d / 0.9)
            n = n.masked_fill(reached, levels)
        position = magnitude * slope + n * (8 / 9)
        code = torch.minimum(position, 2 * n - 0.5).to(torch.int32)
        positive = code.masked_fill(magnitude >= 63.775, 128)
        both = torch.where(scaled < 0, code + 128, positive)
        both = both.masked_fill(magnitude < 64 * 2.75e-7, 0)
        return head_bytes(words), both.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        levels = _LEVELS.to(codes.device, non_blocking=True)
        return levels[codes.long()] * read_scales(heads)


def _no_heads(rows: Tensor) -> Tensor:
    return rows.new_empty(len(rows), 0, dtype=torch.uint8)
