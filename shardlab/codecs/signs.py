"""One bit per element: `sign`, `efsign` and `onebit`.

One bit has no code for zero: an element of zero decodes to zero only where the whole group (for
`sign`, the whole message) is zero. Parameters whose gradient is exactly zero in many steps
accumulate an error from that, which error feedback cancels one step later.
"""

from collections.abc import Sequence

from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey
from shardlab.codecs.grouped import GroupedCodec
from shardlab.codecs.kernels import sign
from shardlab.codecs.kernels.signs import KERNELS


class Sign(Codec):
    """D = m sgn(x), m = mean|x| of the message; several payloads are a majority vote.

    signSGD with majority vote (Bernstein et al. 2018, section 3.3; 2019, algorithm 1): the owner of
    a shard takes the sign of the sum of the ranks' signs, 0 for a tie. The papers send no magnitude
    and leave the scale to the learning rate. Here a payload carries m, and `decode_sum` writes
    alpha * (m_0 + m_1 + ...) * (winning sign): on the scale of a sum of W vectors, so that
    alpha = 1/W gives the mean magnitude. A message of zeros has no vote.

    1 + 32/n bits per element. Biased. A single payload is a contraction with
    delta >= (1 - 2^-16) ||x||_1^2 / (n ||x||_2^2), small for whole gradients; a vote has no such
    bound and can diverge. Not linear. All elements of a message come out with one magnitude:
    right for SGD on the sign, wrong for Adam, whose second moment then holds that constant and not
    the scale of each element.
    Wire: see `shardlab.codecs.kernels.sign`. A value that is not finite makes the whole message NaN.
    """

    name = "sign"
    unbiased = False
    votes = True

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return sign.payload_bytes(n)

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(n, 0, sign.MAGNITUDE_BYTES)

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        return sign.encode(vector, out)

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return sign.encode_residual(vector, residual, kept, out)

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self._check_payload(payload, out.numel())
        sign.decode_add(payload, out, alpha)

    def decode_sum(
        self,
        payloads: Sequence[Tensor],
        out: Tensor,
        alpha: float = 1.0,
        keys: Sequence[MessageKey] | None = None,
    ) -> None:
        """Set out to alpha * (sum of magnitudes) * (sign that most ranks sent, 0 for a tie)."""
        for payload in payloads:
            self._check_payload(payload, out.numel())
        sign.decode_votes(payloads, out, alpha)


class EfSign(GroupedCodec):
    """D = m sgn(x), m = mean|x| of a group, rounded to the nearest bfloat16.

    The compressor of EF-signSGD (Karimireddy et al. 2019, algorithm 1), on groups instead of
    layers. 1 + 16/group bits per element. Biased; in each group of d elements a contraction with
    delta >= (1 - 2^-16) ||x||_1^2 / (d ||x||_2^2) (their section 4, less the rounding of m; a group
    whose m is below 2^-126 decodes to zeros): larger than for a whole gradient, whose tails are
    heavy. It needs error feedback. Not linear: every sender has its own means.
    Wire: see `shardlab.codecs.kernels.signs`. A group with a value that is not finite decodes to NaN.

    Args:
        group: elements that share one magnitude.
    """

    name = "efsign"
    unbiased = False

    def __init__(self, group: int = 512) -> None:
        super().__init__(KERNELS["efsign"], group)


class OneBit(GroupedCodec):
    """D = mean of the x >= 0 of a group where x >= 0, mean of its x < 0 where x < 0.

    1-bit SGD (Seide et al. 2014, section 3.1: quantized at zero, reconstructed by the means of the
    two halves), with groups in place of the columns of a matrix and means rounded to the nearest
    bfloat16. 1 + 32/group bits per element. Biased; a contraction, with an error no larger than
    that of `efsign` up to the rounding of the means, since two means are the best two values. It
    needs error feedback. Not linear: every sender has its own means.
    Wire: see `shardlab.codecs.kernels.signs`. A group with a value that is not finite decodes to NaN.

    Args:
        group: elements that share two means.
    """

    name = "onebit"
    unbiased = False

    def __init__(self, group: int = 512) -> None:
        super().__init__(KERNELS["onebit"], group)
