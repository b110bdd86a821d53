"""Integers with a scale per group: `int8` and `int4`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import int4, int8
from shardlab.kernels.grouped import GroupedKernel


class Int8(GroupedCodec):
    """C(x)_i = s * round(x_i / s), s = max|x| / 127 in a group, rounded up to bfloat16.

    The group-wise symmetric quantizer of ZeRO++ (Wang et al. 2023, section 3.1). 8 + 16/group bits
    per element. `nearest` (ties to even) is biased, |x_i - C(x)_i| <= s/2, a contraction;
    `stochastic` rounds up with the probability that makes it unbiased, |x_i - C(x)_i| < s, and
    E|C(x) - x|^2 <= n s^2 / 4. Not linear: every sender has its own scales. Wire: see
    `shardlab.kernels.int8`. A group with a value that is not finite decodes to NaN.

    Args:
        group: elements that share one scale.
        rounding: `nearest` or `stochastic`.
    """

    name = "int8"

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        self.unbiased = rounding == "stochastic"
        super().__init__(int8.STOCHASTIC if self.unbiased else int8.KERNEL, group)


class Int4(GroupedCodec):
    """C(x)_i = s * code, four bits for each code: the quantizer of ZeRO++ and SDP4Bit.

    4 + 16/group bits per element. Not linear. Wire: see `shardlab.kernels.int4`. A group with a
    value that is not finite decodes to NaN. By rounding and levels:

    - nearest, uniform: codes -8 to 7, the element of largest magnitude has -8 and its sign lies in
      s (as in GGML's Q4_0). Biased, |x_i - C(x)_i| <= s/2, or s where 7 is the nearest left;
      a contraction.
    - stochastic, uniform: codes -7 to 7, s = max|x| / 7: unbiased, |x_i - C(x)_i| < s.
    - nearest, nf4: the quantiles of a normal distribution (Dettmers et al. 2023, "QLoRA", section
      3), s = max|x|: biased, a contraction.

    Args:
        group: elements that share one scale.
        rounding: `nearest` or `stochastic`.
        levels: `uniform` or `nf4`.
    """

    name = "int4"

    def __init__(
        self, group: int = 128, rounding: str = "nearest", levels: str = "uniform"
    ) -> None:
        self.unbiased = rounding == "stochastic"
        super().__init__(_int4_kernel(levels, self.unbiased), group)


def _int4_kernel(levels: str, stochastic: bool) -> GroupedKernel:
    if levels == "nf4":
        return int4.NORMAL_FLOAT
    return int4.STOCHASTIC if stochastic else int4.NEAREST
