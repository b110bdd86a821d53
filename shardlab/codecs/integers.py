"""Integers with a scale per group: `int8`, `int4` and `qsgd`. Wire: docs/wire-formats.md.

An element decodes to `code * scale`, which float32 represents exactly. With steps = x times the
float32 reciprocal of the scale (one division per group), the code is

* nearest: steps rounded to the nearest integer, ties to even;
* stochastic: floor(steps + u), where steps are cut to 24 bits after the point and u is a fraction
  made of the upper 24 random bits of the element, so that the mean over u is steps. Steps that
  float32 rounded above the largest code are set to the largest code first.

Codes are at most 2**(bits - 1) - 1. Codes of 8 bits are two's complement; narrower codes are stored
with 2**(bits - 1) added. Groups with scale 0 or NaN have codes 0. With nearest rounding float32
represents the error exactly, so that payload and residual add up to the input.
"""

import torch
from torch import Tensor

from shardlab.codecs.grouped import GroupedCodec
from shardlab.codecs.scales import (
    NOT_FINITE,
    head_bytes,
    norm_words,
    read_scales,
    scale_words,
    signed_scale_words,
    widened,
)
from shardlab.kernels.compiled import constant

_LEVELS = (
    *(-32768, -22813, -17206, -12941, -9321, -6055, -2984, 0),
    *(2608, 5273, 8065, 11073, 14441, 18436, 23690, 32768),
)
NF4 = tuple(level / 2**15 for level in _LEVELS)
"""Levels of NormalFloat by code: the quantiles of the normal distribution of Dettmers et al. 2023
(QLoRA, appendix E), rounded to multiples of 2**-15."""
_NF4 = torch.tensor(NF4)
"""The levels as a tensor, since torch.compile makes each number of a tuple an input."""


def quantize(
    rows: Tensor, words: Tensor, bits: int, chance: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return heads and codes of groups.

    Args:
        rows: float32 [groups, G].
        words: Bits of the bfloat16 scales, int16 [groups, 1].
        bits: Bits of a code.
        chance: Uniform in [0, 1), float32 [groups, G]; None rounds to the nearest.
    """
    blank = (words == 0) | (words == NOT_FINITE)
    steps = rows * widened(words).masked_fill(blank, 1.0).reciprocal()
    steps = steps.masked_fill(blank, 0.0)
    top = 2 ** (bits - 1) - 1
    if chance is None:
        codes = steps.round().clamp_max(top).to(torch.int32)
    else:
        fixed = (steps * 2.0**24).to(torch.int64).clamp_max(top << 24)
        codes = (fixed + (chance * 2.0**24).to(torch.int64)) >> 24
    stored = codes if bits == 8 else codes + 2 ** (bits - 1)
    return head_bytes(words), (stored & (2**bits - 1)).to(torch.uint8)


def dequantize(heads: Tensor, codes: Tensor, bits: int) -> Tensor:
    """Return the decoded rows, float32 [groups, G]."""
    if bits == 8:
        values = codes.view(torch.int8).to(torch.float32)
    else:
        values = codes.to(torch.float32) - 2 ** (bits - 1)
    return values.mul(read_scales(heads))


class Int8(GroupedCodec):
    """C(x)_i = s * round(x_i / s), s = max|x| / 127 in a group, rounded up to bfloat16.

    The group-wise symmetric quantizer of ZeRO++ (Wang et al. 2023, section 3.1). 8 + 16/group bits
    per element. `nearest` (ties to even) is biased, |x_i - C(x)_i| <= s/2, a contraction;
    `stochastic` rounds up with the probability that makes it unbiased, |x_i - C(x)_i| < s, and
    E|C(x) - x|^2 <= n s^2 / 4. Not linear, since the scales of senders differ. A group with a value
    that is not finite decodes to NaN.

    Args:
        group: Elements that share one scale.
        rounding: `nearest` or `stochastic`.
    """

    name = "int8"
    head_bytes = 2
    bits = 8
    kernels = True

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        self.random = self.unbiased = rounding == "stochastic"
        super().__init__(group, "int8_stochastic" if self.random else "int8")

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        return quantize(rows, scale_words(rows, 127), 8, chance)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return dequantize(heads, codes, 8)


class Int4(GroupedCodec):
    """C(x)_i = s * code with four bits per code: the quantizer of ZeRO++ and SDP4Bit.

    4 + 16/group bits per element. Not linear. A group with a value that is not finite decodes to
    NaN. By rounding and levels:

    - nearest, uniform: codes -8 to 7. The element of largest magnitude has code -8, and s has the
      opposite sign (as in GGML's Q4_0). If two such elements have opposite signs, the positive one
      decides. Biased, |x_i - C(x)_i| <= s/2, or s where 8 would be the nearest code; a contraction.
    - stochastic, uniform: codes -7 to 7, s = max|x| / 7. Unbiased, |x_i - C(x)_i| < s.
    - nearest, nf4: s = max|x|. x_i / s becomes the nearest of the quantiles `NF4` of a normal
      distribution (Dettmers et al. 2023, "QLoRA", section 3), the lower of two equally near ones.
      Biased, a contraction. Groups with scale 0 or NaN have code 7, whose level is 0.

    Args:
        group: Elements that share one scale.
        rounding: `nearest` or `stochastic`.
        levels: `uniform` or `nf4`.
    """

    name = "int4"
    head_bytes = 2
    bits = 4
    kernels = True

    def __init__(
        self, group: int = 128, rounding: str = "nearest", levels: str = "uniform"
    ) -> None:
        self.random = self.unbiased = rounding == "stochastic"
        uniform = "int4_stochastic" if self.random else "int4"
        super().__init__(group, "nf4" if levels == "nf4" else uniform)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        if self.format == "nf4":
            return self._quantize_nf4(rows)
        words = scale_words(rows, 7) if self.random else signed_scale_words(rows, 8)
        return quantize(rows, words, 4, chance)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        if self.format == "nf4":
            levels = _NF4.to(codes.device, non_blocking=True)
            return levels[codes.to(torch.int64)] * read_scales(heads)
        return dequantize(heads, codes, 4)

    def _quantize_nf4(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        words = scale_words(rows, 1.0)
        blank = (words == 0) | (words == NOT_FINITE)
        values = rows * widened(words).masked_fill(blank, 1.0).reciprocal()
        levels = _NF4.to(rows.device, non_blocking=True)
        borders = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(values.masked_fill(blank, 0.0), borders)
        return head_bytes(words), codes.to(torch.uint8)


class Qsgd(GroupedCodec):
    """C(x)_i = |x|_2 / s * sgn(x_i) * l, l = s |x_i| / |x|_2 rounded down or up at random.

    QSGD (Alistarh et al. 2017, section 3.1) with buckets: |x|_2 is the norm of a group. Unbiased;
    E|C(x) - x|^2 <= min(group / s^2, sqrt(group) / s) |x|^2 in a group (lemma 3.1). Codes have a
    fixed width in place of the paper's Elias codes: 2 bits for s = 1, 4 up to s = 7, 8 up to 127.
    The norm adds 16/group bits per element. Not linear. A group with a value that is not finite
    decodes to NaN.

    Args:
        levels: Levels above zero, s: from 1 to 127.
        group: Elements that share one norm.
    """

    name = "qsgd"
    unbiased = random = True
    head_bytes = 2

    def __init__(self, levels: int = 127, group: int = 128) -> None:
        self._levels = levels
        self.bits = 2 if levels == 1 else 4 if levels <= 7 else 8
        super().__init__(group, f"qsgd{levels}")

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        words = norm_words(rows, constant(self._levels))
        return quantize(rows, words, constant(self.bits), chance)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return dequantize(heads, codes, constant(self.bits))
