"""Random levels of the Euclidean norm of a group: `shardlab.kernels.integers`.

The scale is the norm of the group over the number of levels, which is the largest code.
"""

from shardlab.kernels.grouped import GroupedKernel
from shardlab.kernels.integers import IntegerFormat
from shardlab.kernels.scales import norm_words


class Qsgd127Format(IntegerFormat):
    """Levels up to 127, in 8 bits."""

    name = "qsgd127"
    bits = 8
    levels = 127
    scale = staticmethod(norm_words)
    random = True


class Qsgd7Format(Qsgd127Format):
    """Levels up to 7, in 4 bits."""

    name = "qsgd7"
    bits = 4
    levels = 7


class Qsgd1Format(Qsgd127Format):
    """Levels -1, 0 and 1, in 2 bits."""

    name = "qsgd1"
    bits = 2
    levels = 1


KERNELS = {
    format.levels: GroupedKernel(format)
    for format in (Qsgd1Format(), Qsgd7Format(), Qsgd127Format())
}
"""by the number of levels"""
