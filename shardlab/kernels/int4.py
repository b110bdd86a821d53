"""Four-bit codes with one scale per group.

Layout: `shardlab.kernels.grouped`, with a head of 2 bytes (scale, bfloat16) and codes of 4 bits.
An element decodes to `code * scale`, exactly representable in float32 for integers. Groups of zeros
and groups with something not finite are those of `shardlab.kernels.int8`.

int4, nearest: all 16 integers from -8 to 7. The scale is the element of largest magnitude divided
by -8 (as in GGML's Q4_0), so that this element has code -8 whatever its sign; if both signs have
it, the positive one. Its magnitude is rounded up to bfloat16. Codes above 7 become 7.

int4, stochastic: integers from -7 to 7 as in int8: nothing is clipped and the mean is exact.

nf4: the 16 levels of NormalFloat (Dettmers et al. 2023, appendix E) times the largest magnitude,
rounded up to bfloat16 and at least 2**-120; the nearest level, the lower one half-way. They are
quantiles of a normal distribution: the code book for bell-shaped groups. Where there is no scale
the code is 7, the level 0.
"""

import torch
from torch import Tensor

from shardlab.kernels.grouped import Format, GroupedKernel
from shardlab.kernels.integers import IntegerFormat, scale_words, widened

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class _Int4Format(IntegerFormat):
    """Nearest, with the sign of the scale chosen so that all 16 codes are used."""

    def words(self, rows: Tensor) -> Tensor:
        words = scale_words(rows, 8.0)
        largest = rows.abs().amax(1, keepdim=True)
        flipped = (rows.amax(1, keepdim=True) == largest) & (widened(words) > 0)
        return torch.where(flipped, words | -0x8000, words)


class _Nf4Format(Format):
    name = "nf4"
    head_bytes = 2
    bits = 4

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        words = scale_words(rows, 1.0, 2.0**-120)
        scale = widened(words)
        exact = rows * torch.where(scale > 0, scale, 1.0).reciprocal()
        levels = torch.tensor(NF4_LEVELS, device=rows.device)
        borders = (levels[:-1] + levels[1:]) * 0.5
        codes = torch.bucketize(torch.where(scale > 0, exact, 0.0), borders)
        return words.view(torch.uint8), codes

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:
        levels = torch.tensor(NF4_LEVELS, device=codes.device)
        return levels[codes.long()] * widened(heads.clone().view(torch.int16))


NEAREST = GroupedKernel(_Int4Format("int4", 4, 7))
STOCHASTIC = GroupedKernel(IntegerFormat("int4_stochastic", 4, 7, stochastic=True))
NF4 = GroupedKernel(_Nf4Format())
