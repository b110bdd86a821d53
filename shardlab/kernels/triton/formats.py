"""The formats that have Triton kernels, by the name of `shardlab.kernels.grouped.Format`."""

from shardlab.kernels.triton.int8 import INT8

FORMATS = {"int8": INT8}
