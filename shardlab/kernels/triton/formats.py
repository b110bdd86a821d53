"""The formats that have Triton kernels, by the name of `shardlab.kernels.grouped.Format`."""

from shardlab.kernels.triton.integers import INT4, INT4_STOCHASTIC, INT8, INT8_STOCHASTIC
from shardlab.kernels.triton.signs import EFSIGN

FORMATS = {
    "int8": INT8,
    "int8_stochastic": INT8_STOCHASTIC,
    "int4": INT4,
    "int4_stochastic": INT4_STOCHASTIC,
    "efsign": EFSIGN,
}
