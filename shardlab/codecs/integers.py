"""Integers with a scale per group: `int8`, `int4` and `qsgd`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.codecs.kernels.integers import KERNELS


class Int8(GroupedCodec):
    """C(x)_i = s * round(x_i / s), s = max|x| / 127 in a group, rounded up to bfloat16.

    The group-wise symmetric quantizer of ZeRO++ (Wang et al. 2023, section 3.1). 8 + 16/group bits
    per element. `nearest` (ties to even) is biased, |x_i - C(x)_i| <= s/2, a contraction;
    `stochastic` rounds up with the probability that makes it unbiased, |x_i - C(x)_i| < s, and
    E|C(x) - x|^2 <= n s^2 / 4. Not linear: every sender has its own scales. Wire: see
    `shardlab.codecs.kernels.integers`. A group with a value that is not finite decodes to NaN.

    Args:
        group: elements that share one scale.
        rounding: `nearest` or `stochastic`.
    """

    name = "int8"

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        self.unbiased = rounding == "stochastic"
        super().__init__(KERNELS["int8_stochastic" if self.unbiased else "int8"], group)


class Int4(GroupedCodec):
    """C(x)_i = s * code, four bits for each code: the quantizer of ZeRO++ and SDP4Bit.

    4 + 16/group bits per element. Not linear. Wire: see `shardlab.codecs.kernels.integers`. A group with a
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
        uniform = "int4_stochastic" if self.unbiased else "int4"
        super().__init__(KERNELS["nf4" if levels == "nf4" else uniform], group)


class Qsgd(GroupedCodec):
    """C(x)_i = |x|_2 / s * sgn(x_i) * l, l = s |x_i| / |x|_2 rounded down or up at random.

    QSGD (Alistarh et al. 2017, section 3.1) with buckets: |x|_2 is the norm of a group. Unbiased;
    E|C(x) - x|^2 <= min(group / s^2, sqrt(group) / s) |x|^2 in a group (lemma 3.1). Codes of equal
    width rather than the paper's Elias codes: 2, 4 or 8 bits for s = 1, 7 or 127, and 16/group for
    the norm. Not linear. Wire: see `shardlab.codecs.kernels.integers`. A group with a value that is not
    finite decodes to NaN.

    Args:
        levels: s, levels above zero.
        group: elements that share one norm.
    """

    name = "qsgd"
    unbiased = True

    def __init__(self, levels: int = 127, group: int = 128) -> None:
        super().__init__(KERNELS[f"qsgd{levels}"], group)
