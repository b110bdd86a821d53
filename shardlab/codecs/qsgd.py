"""Stochastic levels of the Euclidean norm: `qsgd`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import qsgd


class Qsgd(GroupedCodec):
    """C(x)_i = |x|_2 / s * sgn(x_i) * l, l = s |x_i| / |x|_2 rounded down or up at random.

    QSGD (Alistarh et al. 2017, section 3.1) with buckets: |x|_2 is the norm of a group. Unbiased;
    E|C(x) - x|^2 <= min(group / s^2, sqrt(group) / s) |x|^2 in a group (lemma 3.1). Codes of equal
    width rather than the paper's Elias codes: 2, 4 or 8 bits for s = 1, 7 or 127, and 16/group for
    the norm. Not linear. Wire: see `shardlab.kernels.qsgd`. A group with a value that is not finite
    decodes to NaN.

    Args:
        levels: s, levels above zero.
        group: elements that share one norm.
    """

    name = "qsgd"
    unbiased = True

    def __init__(self, levels: int = 127, group: int = 128) -> None:
        super().__init__(qsgd.KERNELS[levels], group)
