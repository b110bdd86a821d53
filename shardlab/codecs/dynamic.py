"""The dynamic tree data type: `dynamic8`."""

from shardlab.codecs.grouped import GroupedCodec
from shardlab.kernels import dynamic8


class Dynamic8(GroupedCodec):
    """C(x)_i = s * (the nearest of 256 levels to x_i / s), s = max|x| in a group, as bfloat16.

    Levels lie in seven decades below 1: the zeros before the first one of a code count the decade,
    what follows is a linear fraction of it (Dettmers 2016, "8-bit approximations for parallelism
    in deep learning"; told again in Dettmers et al. 2022, "8-bit optimizers via block-wise
    quantization", section 1.3, and normalised per group as in its section 2.1). 8 + 16/group bits
    per element. Biased: within decade d (10^-(d+1) s to 10^-d s, n = 2^(6-d) levels) the error is
    at most 0.9/n * 10^-d s; always a contraction, since 0 is a level. Not linear: every sender has
    its own scales. Wire: see `shardlab.kernels.dynamic8`. A group with a value that is not finite
    decodes to NaN.

    Args:
        group: elements that share one scale.
    """

    name = "dynamic8"
    unbiased = False

    def __init__(self, group: int = 256) -> None:
        super().__init__(dynamic8.KERNEL, group)
