"""Levels of NormalFloat, for the reference and for Triton: `shardlab.codecs.kernels.integers`."""

_NF4 = (
    *(-32768, -22813, -17206, -12941, -9321, -6055, -2984, 0),
    *(2608, 5273, 8065, 11073, 14441, 18436, 23690, 32768),
)
NF4 = tuple(level / 2**15 for level in _NF4)
"""the levels of NormalFloat by code"""
