"""Stochastic powers of two: `natural`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import natural


class Natural(GroupedCodec):
    """C(x)_i = sign(x_i) 2^e or sign(x_i) 2^(e+1), where 2^e <= |x_i| < 2^(e+1).

    The larger with probability |x_i| / 2^e - 1: unbiased, E|C(x) - x|^2 <= |x|^2 / 8 (Horvath et
    al. 2019, "Natural compression for distributed deep learning", section 2). For error feedback:
    a normal x_i is never off by more than itself. 9 bits per element. Subnormal x_i become 0
    or 2^-126, unbiased too. Magnitudes above 2^127 count as not finite and decode to infinity, as
    does NaN. Not linear: sums of powers of two are none. Wire: see `shardlab.kernels.natural`.
    """

    name = "natural"
    unbiased = True

    def __init__(self) -> None:
        super().__init__(natural.KERNEL, natural.GROUP)
