"""Integers with a scale per group: `int8` and `int4`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import int4, int8


class Int8(GroupedCodec):
    """q_i = round(x_i / s), s = max|x| / 127 in a group; the group-wise symmetric quantizer.

    ZeRO++ (Wang et al. 2023, section 3.1). 8 + 16/group bits per element. Rounding:

    * nearest: biased, |x_i - D_i| <= s/2;
    * stochastic: floor(x_i / s + u_i) with u_i uniform in [0, 1): unbiased, variance at most s^2/4
      per element.

    s is rounded up to bfloat16, so the largest element is not clipped. Payloads cannot be summed:
    every sender has its own scales. Wire: see `shardlab.kernels.int8`. A group with a value that is
    not finite decodes to NaN.

    Args:
        group: elements that share one scale.
        rounding: nearest or stochastic.
    """

    name = "int8"

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        super().__init__(int8.STOCHASTIC if rounding == "stochastic" else int8.KERNEL, group)


class Int4(GroupedCodec):
    """Four-bit codes: integers times a scale, or the levels of NormalFloat.

    4 + 16/group bits per element. Payloads cannot be summed. Wire: see `shardlab.kernels.int4`. A
    group with a value that is not finite decodes to NaN. With m the largest magnitude of a group:

    * nearest: q_i = round(x_i / s) in [-8, 7] with |s| = m/8, of the sign that makes the largest
      element -8. Biased, |x_i - D_i| <= m/16, but up to m/8 for elements above 15/16 m of the
      other sign. (The symmetric quantizer of ZeRO++, Wang et al. 2023, section 3.1, with the signed
      scale of ggml's Q4_0, which makes use of all 16 codes.)
    * stochastic: floor(x_i / s + u_i) with s = m/7 and u_i uniform in [0, 1): unbiased, variance at
      most s^2/4 per element.
    * levels nf4: the nearest of 16 quantiles of the normal distribution times m (Dettmers et al.
      2023, QLoRA, section 3). Biased, |x_i - D_i| <= 0.152 m.

    Scales are rounded up to bfloat16 in magnitude.

    Args:
        group: elements that share one scale.
        rounding: nearest or stochastic.
        levels: uniform or nf4.
    """

    name = "int4"

    def __init__(
        self, group: int = 128, rounding: str = "nearest", levels: str = "uniform"
    ) -> None:
        if levels == "nf4":
            kernel = int4.NORMAL_FLOAT
        else:
            kernel = int4.STOCHASTIC if rounding == "stochastic" else int4.NEAREST
        super().__init__(kernel, group)
