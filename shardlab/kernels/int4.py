"""Four-bit codes with one scale per group: `shardlab.kernels.integers`, and a code book.

* Nearest: the element of largest magnitude has the code -8 and the scale the opposite sign of it;
  of two such elements with opposite signs the positive one counts. So all 16 codes are of use, and
  negating a vector negates what it decodes to (but for such ties). Codes are clipped at 7: an
  element is off by at most half a step, or a whole one at the end that the codes do not reach.
* Stochastic: scale = largest magnitude over 7, so that nothing is clipped.
* NormalFloat: scale = largest magnitude. Code c stands for `NF4[c]` times the scale, exactly
  representable in float32; x times the reciprocal of the scale becomes the nearest level, the lower
  one in the middle. The levels are those of Dettmers et al. 2023 (QLoRA, appendix E) rounded to
  multiples of 2**-15: quantiles of the normal distribution. Blank groups have code 7, which is 0.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel
from shardlab.kernels.integers import IntegerFormat
from shardlab.kernels.scales import NOT_FINITE, scale_words, signed_scale_words, widened

_NF4 = (
    *(-32768, -22813, -17206, -12941, -9321, -6055, -2984, 0),
    *(2608, 5273, 8065, 11073, 14441, 18436, 23690, 32768),
)
NF4 = tuple(level / 2**15 for level in _NF4)
"""the levels of NormalFloat by code"""


class Int4Format(IntegerFormat):
    """Rounded to the nearest."""

    name = "int4"
    bits = 4
    levels = 8
    scale = staticmethod(signed_scale_words)


class Int4StochasticFormat(IntegerFormat):
    """Rounded at random."""

    name = "int4_stochastic"
    bits = 4
    levels = 7
    scale = staticmethod(scale_words)
    random = True


class NormalFloat4Format(Format):
    """The nearest of 16 quantiles of the normal distribution."""

    name = "nf4"
    head_bytes = 2
    bits = 4

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        words = scale_words(rows, 1.0)
        blank = (words == 0) | (words == NOT_FINITE)
        values = rows * widened(words).masked_fill(blank, 1.0).reciprocal()
        levels = rows.new_tensor(NF4)
        borders = (levels[1:] + levels[:-1]) / 2
        codes = torch.bucketize(values.masked_fill(blank, 0.0), borders)
        return words.view(torch.uint8), codes.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        scale = widened(heads.clone().view(torch.int16))
        levels = torch.tensor(NF4, dtype=torch.float32, device=codes.device)
        return levels[codes.to(torch.int64)] * scale


NEAREST = GroupedKernel(Int4Format())
STOCHASTIC = GroupedKernel(Int4StochasticFormat())
NORMAL_FLOAT = GroupedKernel(NormalFloat4Format())
