"""Random levels of the norm: `qsgd`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import qsgd


class Qsgd(GroupedCodec):
    """Q_i = |x|_2 * sgn(x_i) * xi_i, where xi_i is one of the two levels l/s next to |x_i| / |x|_2.

    QSGD (Alistarh et al. 2017, section 3.1), by groups (their section 4): the level is chosen at
    random so that E[Q_i] = x_i. 1 + log2(levels + 1) + 16/group bits per element, that is 8, 4 or 2
    bits and the scale |x|_2 / s, rounded up to bfloat16. Unbiased, and

        E|Q(x) - x|^2 <= min(group / s^2, sqrt(group) / s) |x|^2

    with s = levels, times at most (1 + 2^-7)^2 for the rounded scale. Payloads cannot be summed.
    `int8` and `int4` with stochastic rounding scale by the largest element, which is less than the
    norm: at equal bits they err less. Wire: see `shardlab.kernels.qsgd`. A group with a value that
    is not finite, or of 2**120 and more, decodes to NaN.

    Args:
        levels: s, the levels above zero: 1, 7 or 127.
        group: elements that share one norm.
    """

    name = "qsgd"

    def __init__(self, levels: int = 127, group: int = 128) -> None:
        super().__init__(qsgd.KERNELS[levels], group)
