"""Eight-bit integers with one scale per group: `shardlab.kernels.integers`.

The scale is the largest magnitude of the group over 127.
"""

from shardlab.kernels.grouped import GroupedKernel
from shardlab.kernels.integers import IntegerFormat
from shardlab.kernels.scales import scale_words


class Int8Format(IntegerFormat):
    """Rounded to the nearest."""

    name = "int8"
    bits = 8
    levels = 127
    scale = staticmethod(scale_words)


class Int8StochasticFormat(Int8Format):
    """Rounded at random."""

    name = "int8_stochastic"
    random = True


KERNEL = GroupedKernel(Int8Format())
STOCHASTIC = GroupedKernel(Int8StochasticFormat())
