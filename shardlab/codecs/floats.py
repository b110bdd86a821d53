"""Shorter floats: `bf16`, `fp16` and `natural` without a scale, `fp8` and `dynamic8` with one."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.codecs.kernels import float8, floats


class BFloat16(GroupedCodec):
    """C(x) = x rounded to bfloat16, to nearest even. 16 bits per element.

    Biased, relative error at most 2^-8 per element for normal numbers; a contraction with
    delta >= 1 - 2^-16. Wire: n bfloat16, little endian. Payloads are not summed on the wire, since
    that would round once per rank.
    """

    name = "bf16"
    unbiased = False

    def __init__(self) -> None:
        super().__init__(floats.KERNELS["bf16"], floats.GROUP)


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
        super().__init__(floats.KERNELS["fp16"], floats.GROUP)


class Natural(GroupedCodec):
    """C(x)_i = sign(x_i) 2^e or sign(x_i) 2^(e+1), where 2^e <= |x_i| < 2^(e+1).

    The larger with probability |x_i| / 2^e - 1: unbiased, E|C(x) - x|^2 <= |x|^2 / 8 (Horvath et
    al. 2019, "Natural compression for distributed deep learning", section 2). For error feedback:
    a normal x_i is never off by more than itself. 9 bits per element. Subnormal x_i become 0
    or 2^-126, unbiased too. Magnitudes above 2^127 count as not finite and decode to infinity, as
    does NaN. Not linear: sums of powers of two are none. Wire: see `shardlab.codecs.kernels.floats`.
    """

    name = "natural"
    unbiased = True

    def __init__(self) -> None:
        super().__init__(floats.KERNELS["natural"], floats.GROUP)


class Fp8(GroupedCodec):
    """C(x)_i = s * round(x_i / s) to the nearest 8-bit float, ties to even.

    s = max|x| / L in a group, rounded up to bfloat16, where L is the largest number of the format:
    448 of e4m3, 57344 of e5m2 (Micikevicius et al. 2022, "FP8 formats for deep learning", section
    3). 8 + 16/group bits per element. Biased: the error of an element is at most 2^-4 |x_i| (e4m3)
    or 2^-3 |x_i| (e5m2), or 2^-10 s or 2^-17 s where that is more; a contraction, since 0 is a
    value. Not linear: every sender has its own scales. Wire: see `shardlab.codecs.kernels.float8`. A group
    with a value that is not finite decodes to NaN.

    Args:
        format: bits of exponent and mantissa, `e4m3` or `e5m2`.
        group: elements that share one scale.
    """

    name = "fp8"
    unbiased = False

    def __init__(self, format: str = "e4m3", group: int = 128) -> None:
        super().__init__(float8.KERNELS[format], group)


class Dynamic8(GroupedCodec):
    """C(x)_i = s * (the nearest of 256 levels to x_i / s), s = max|x| in a group, as bfloat16.

    Levels lie in seven decades below 1: the zeros before the first one of a code count the decade,
    what follows is a linear fraction of it (Dettmers 2016, "8-bit approximations for parallelism
    in deep learning"; also Dettmers et al. 2022, "8-bit optimizers via block-wise
    quantization", section 1.3, and normalised per group as in its section 2.1). 8 + 16/group bits
    per element. Biased: within decade d (10^-(d+1) s to 10^-d s, n = 2^(6-d) levels) the error is
    at most 0.9/n * 10^-d s; always a contraction, since 0 is a level. Not linear: every sender has
    its own scales. Wire: see `shardlab.codecs.kernels.float8`. A group with a value that is not finite
    decodes to NaN.

    Args:
        group: elements that share one scale.
    """

    name = "dynamic8"
    unbiased = False

    def __init__(self, group: int = 256) -> None:
        super().__init__(float8.KERNELS["dynamic8"], group)
