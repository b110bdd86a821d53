"""Eight-bit floats with a scale per group: `fp8`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import fp8


class Fp8(GroupedCodec):
    """C(x)_i = s * round(x_i / s) to the nearest 8-bit float, ties to even.

    s = max|x| / L in a group, rounded up to bfloat16, where L is the largest number of the format:
    448 of e4m3, 57344 of e5m2 (Micikevicius et al. 2022, "FP8 formats for deep learning", section
    3). 8 + 16/group bits per element. Biased: the error of an element is at most 2^-4 |x_i| (e4m3)
    or 2^-3 |x_i| (e5m2), or 2^-10 s or 2^-17 s where that is more; a contraction, since 0 is a
    value. Not linear: every sender has its own scales. Wire: see `shardlab.kernels.fp8`. A group
    with a value that is not finite decodes to NaN.

    Args:
        format: bits of exponent and mantissa, `e4m3` or `e5m2`.
        group: elements that share one scale.
    """

    name = "fp8"
    unbiased = False

    def __init__(self, format: str = "e4m3", group: int = 128) -> None:
        super().__init__(fp8.KERNELS[format], group)
