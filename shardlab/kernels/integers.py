"""Integers with one scale per group, rounded to the nearest or at random.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (`shardlab.kernels.scales`). An element
decodes to `code * scale`, exactly representable in float32. With steps = x times the float32
reciprocal of the scale (one division per group), the code is

* nearest: steps rounded to the nearest integer, ties to even;
* stochastic: floor(steps + u), with steps cut to 24 bits after the point and u the upper 24 of the
  element's random bits (`shardlab.kernels.random`) as a fraction, so the mean over u is steps;
  steps that float32 rounded above the largest code are first set to it.

Codes are at most 2**(bits - 1) - 1. Those of 8 bits are two's complement, narrower ones are stored
with 2**(bits - 1) added. Groups with scale 0 or NaN have codes 0.

With a residual and nearest rounding, what is lost is exactly representable in float32: what is sent
and what is kept add up to what was given.
"""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format
from shardlab.kernels.scales import NOT_FINITE, widened


class IntegerFormat(Format):
    """Subclasses say how a scale is found, and how many bits a code has."""

    head_bytes = 2
    levels: ClassVar[int]
    """the code of what `scale` measures"""

    @staticmethod
    @abstractmethod
    def scale(rows: Tensor, levels: float) -> Tensor:
        """Bits of the scales: a function of `shardlab.kernels.scales`."""

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
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

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        scale = widened(heads.clone().view(torch.int16))
        if self.bits == 8:
            values = codes.view(torch.int8).to(torch.float32)
        else:
            values = codes.to(torch.float32) - 2 ** (self.bits - 1)
        return values.mul(scale)
