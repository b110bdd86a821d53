"""Integer codes with one scale per group: `int8`, `int4`, QSGD's levels, and NormalFloat.

Layout: `shardlab.codecs.kernels.grouped`, with a head of 2 bytes (`shardlab.codecs.kernels.scales`). An element
decodes to `code * scale`, exactly representable in float32. With steps = x times the float32
reciprocal of the scale (one division per group), the code is

* nearest: steps rounded to the nearest integer, ties to even;
* stochastic: floor(steps + u), with steps cut to 24 bits after the point and u the upper 24 of the
  element's random bits (`shardlab.codecs.kernels.random`) as a fraction, so the mean over u is steps;
  steps that float32 rounded above the largest code are first set to it.

Codes are at most 2**(bits - 1) - 1. Those of 8 bits are two's complement, narrower ones are stored
with 2**(bits - 1) added. Groups with scale 0 or NaN have codes 0. With a residual and nearest
rounding, what is lost is exactly representable in float32: sent and kept add up to the input.

* `int8`: the scale is the largest magnitude of the group over 127.
* `int4`: the element of largest magnitude has the code -8 and the scale the opposite of its sign;
  of two such elements with opposite signs the positive one counts. So all 16 codes are used, and
  negating a vector negates what it decodes to (but for such ties). Codes are clipped at 7: the
  error of an element is at most half a step, or a whole one at the end that no code reaches.
* `int4_stochastic`: the scale is the largest magnitude over 7, so that nothing is clipped.
* `qsgdS`: the scale is the Euclidean norm of the group over S, the number of levels.
* `nf4`: the scale is the largest magnitude. Code c stands for `NF4[c]` times the scale, exactly
  representable in float32; x times the reciprocal of the scale becomes the nearest level, the lower
  one half-way. The levels are those of Dettmers et al. 2023 (QLoRA, appendix E) rounded to
  multiples of 2**-15: quantiles of the normal distribution. Groups with scale 0 or NaN have code 7,
  whose level is 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.codecs.kernels.grouped import Format, GroupedKernel
from shardlab.codecs.kernels.levels import NF4
from shardlab.codecs.kernels.scales import (
    NOT_FINITE,
    norm_words,
    read_scales,
    scale_words,
    signed_scale_words,
    widened,
)


@dataclass(frozen=True)
class _Integers(Format):
    name: str
    bits: int
    levels: int
    """code of the magnitude that `scale` measures"""
    scale: Callable[[Tensor, float], Tensor]
    """a function of `shardlab.codecs.kernels.scales`"""
    random: bool = False
    head_bytes = 2

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        words = self.scale(rows, self.levels)
        blank = (words == 0) | (words == NOT_FINITE)
        steps = rows * widened(words).masked_fill(blank, 1.0).reciprocal()
        steps = steps.masked_fill(blank, 0.0)
        top = 2 ** (self.bits - 1) - 1
        if chance is None:
            codes = steps.round().clamp_max(top).to(torch.int32)
        else:
            fixed = (steps * 2.0**24).to(torch.int64).clamp_max(top << 24)
            codes = (fixed + (chance * 2.0**24).to(torch.int64)) >> 24
        stored = codes if self.bits == 8 else codes + 2 ** (self.bits - 1)
        return words.view(torch.uint8), (stored & (2**self.bits - 1)).to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        if self.bits == 8:
            values = codes.view(torch.int8).to(torch.float32)
        else:
            values = codes.to(torch.float32) - 2 ** (self.bits - 1)
        return values.mul(read_scales(heads))


class _NormalFloat4(Format):
    name = "nf4"
    head_bytes = 2
    bits = 4

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        words = scale_words(rows, 1.0)
        blank = (words == 0) | (words == NOT_FINITE)
        values = rows * widened(words).masked_fill(blank, 1.0).reciprocal()
        levels = rows.new_tensor(NF4)
        borders = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(values.masked_fill(blank, 0.0), borders)
        return words.view(torch.uint8), codes.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        levels = torch.tensor(NF4, dtype=torch.float32, device=codes.device)
        return levels[codes.to(torch.int64)] * read_scales(heads)


_FORMATS: tuple[Format, ...] = (
    _Integers("int8", 8, 127, scale_words),
    _Integers("int8_stochastic", 8, 127, scale_words, random=True),
    _Integers("int4", 4, 8, signed_scale_words),
    _Integers("int4_stochastic", 4, 7, scale_words, random=True),
    _Integers("qsgd1", 2, 1, norm_words, random=True),
    _Integers("qsgd7", 4, 7, norm_words, random=True),
    _Integers("qsgd127", 8, 127, norm_words, random=True),
    _NormalFloat4(),
)
KERNELS = {format.name: GroupedKernel(format) for format in _FORMATS}
"""by format"""
