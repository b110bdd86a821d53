"""Casts to a shorter float: `bf16`, `fp16`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import casts


class BFloat16(GroupedCodec):
    """C(x) = x rounded to bfloat16, to nearest even. 16 bits per element.

    Biased, relative error at most 2^-8 per element for normal numbers; a contraction with
    delta >= 1 - 2^-16. Wire: n bfloat16, little endian. Payloads are not summed on the wire, since
    that would round once per rank.
    """

    name = "bf16"
    unbiased = False

    def __init__(self) -> None:
        super().__init__(casts.BF16, casts.GROUP)


class Float16(GroupedCodec):
    """C(x) = x rounded to float16 (IEEE 754, binary16), to nearest even. 16 bits per element.

    Finite magnitudes above 65504 become 65504; the residual keeps the rest. Biased; for magnitudes
    from 2^-14 to 65504 the relative error is at most 2^-11 (a contraction with delta >= 1 - 2^-22
    there), below 2^-14 the error is at most 2^-25. Wire: n float16, little endian. Payloads are not
    summed on the wire, since that would round, and could overflow, once per rank.
    """

    name = "fp16"
    unbiased = False

    def __init__(self) -> None:
        super().__init__(casts.FP16, casts.GROUP)
