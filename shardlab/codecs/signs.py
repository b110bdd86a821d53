"""One bit per element: `sign`, `efsign` and `onebit`. Wire: docs/wire-formats.md.

The bit of an element is set if the element is below zero: zeros of either sign and NaN count as
positive. One bit has no code for zero, so a zero decodes to zero only if its whole group (for
`sign`, the whole message) is zero. Parameters whose gradient is exactly zero in many steps get an
error from this; error feedback cancels it one step later.

A group is summed in 32 lanes (`shardlab.kernels.arithmetic.lane_sums`) in float32, so that every
instruction set and device computes the same bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.base import FusedCodec, MessageKey, PayloadContent
from shardlab.codecs.grouped import GroupedCodec, pack, unpack
from shardlab.codecs.scales import NOT_FINITE, head_bytes, read_scales, widened
from shardlab.kernels import native
from shardlab.kernels.arithmetic import lane_sums
from shardlab.kernels.operators import kernel

_LANES = 32
_SMALLEST = 2.0**-126
_MAGNITUDE_BYTES = 4
_BLOCK = 512  # csrc/sign.cpp


class EfSign(GroupedCodec):
    """D = m sgn(x), m = mean|x| of a group, rounded to the nearest bfloat16.

    The compressor of EF-signSGD (Karimireddy et al. 2019, algorithm 1), on groups instead of
    layers. 1 + 16/group bits per element. Biased, so it needs error feedback. In each group of d
    elements a contraction with delta >= (1 - 2^-16) ||x||_1^2 / (d ||x||_2^2) (their section 4,
    less the rounding of m): larger than for a whole gradient, whose tails are heavy. A group whose
    m is below 2^-126 decodes to zeros. Not linear, since the means of senders differ. A group with
    a value that is not finite, or with an infinite sum, decodes to NaN.

    Args:
        group: Elements that share one magnitude.
    """

    name = "efsign"
    unbiased = False
    head_bytes = 2
    bits = 1

    def __init__(self, group: int = 512) -> None:
        super().__init__(group)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        sums = lane_sums(rows.abs(), _LANES)
        words = _mean_words(sums, torch.full_like(sums, rows.shape[1]))
        return head_bytes(words), (rows < 0).to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        mean = read_scales(heads)
        # a mean of zero has no sign
        return torch.where(codes == 0, mean, 0 - mean)


class OneBit(GroupedCodec):
    """D = mean of the x >= 0 of a group where x >= 0, mean of its x < 0 where x < 0.

    1-bit SGD (Seide et al. 2014, section 3.1: quantized at zero, reconstructed by the means of the
    two halves), with groups in place of the columns of a matrix and means rounded to the nearest
    bfloat16. 1 + 32/group bits per element. Biased, so it needs error feedback. A contraction:
    two means are the best two values, so the error does not exceed the error of `efsign`, up to
    the rounding of the means. Not linear, since the means of senders differ. A group with a value
    that is not finite decodes to NaN.

    Args:
        group: Elements that share two means.
    """

    name = "onebit"
    unbiased = False
    head_bytes = 4
    bits = 1

    def __init__(self, group: int = 512) -> None:
        super().__init__(group)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        below = rows < 0
        means = [
            _mean_words(
                lane_sums(torch.where(chosen, rows, 0.0), _LANES),
                chosen.sum(1, keepdim=True).to(torch.float32),
            )
            for chosen in (~below, below)
        ]
        words = torch.cat(means, 1)
        finite = widened(words).isfinite().all(1, keepdim=True)
        words = torch.where(finite, words, NOT_FINITE)
        return head_bytes(words), below.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        positive, negative = read_scales(heads).split(1, 1)
        return torch.where(codes == 0, positive, negative)


class Sign(FusedCodec):
    """D = m sgn(x), m = mean|x| of the message; several payloads are a majority vote.

    signSGD with majority vote (Bernstein et al. 2018, section 3.3; 2019, algorithm 1): the owner of
    a shard takes the sign of the sum of the ranks' signs, 0 for a tie. The papers send no magnitude
    and leave the scale to the learning rate. A payload of this codec includes m, and `decode_sum`
    writes alpha * (m_0 + m_1 + ...) * (winning sign). This is on the scale of a sum of W vectors,
    so alpha = 1/W gives the mean magnitude. A message of zeros does not vote.

    1 + 32/n bits per element. Biased. A single payload is a contraction with
    delta >= (1 - 2^-16) ||x||_1^2 / (n ||x||_2^2), small for whole gradients; a vote has no such
    bound and can diverge. Not linear. All elements of a decoded message have one magnitude. SGD on
    the sign expects this, but Adam does not: its second moment then holds that constant in place of
    the scale of each element. If one value is not finite, the whole message decodes to NaN.
    """

    name = "sign"
    unbiased = False

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return _MAGNITUDE_BYTES + (n + 7) // 8

    def content(self, n: int, payload: Tensor) -> PayloadContent:  # noqa: D102
        return PayloadContent(n, 0, _MAGNITUDE_BYTES)

    def write(  # noqa: D102
        self,
        x: Tensor,
        residual: Tensor | None,
        new_residual: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        self._check_written(x, residual, new_residual, payload)
        if native.compiled(x):
            sums = torch.empty(max(1, -(-x.numel() // _BLOCK)), dtype=torch.float64)
            _ENCODE(x, residual, new_residual, sums, payload)
        else:
            encode_signs(x, residual, new_residual, payload)
        return payload

    def read(  # noqa: D102
        self,
        payloads: list[Tensor],
        out: Tensor,
        alpha: float,
        keys: Sequence[MessageKey] | None,
        add: bool,
    ) -> None:
        self._check_read(payloads, out)
        if native.compiled(out):
            _DECODE(payloads, alpha, add, out)
        else:
            decode_signs(payloads, out, alpha, add)


# not compiled: Inductor of torch 2.13 writes other bytes of the magnitude
def encode_signs(
    x: Tensor, residual: Tensor | None, new_residual: Tensor | None, payload: Tensor
) -> None:
    """Write the payload of `x + residual`, and its error to `new_residual`, in PyTorch."""
    corrected = x if residual is None else x + residual
    n = len(corrected)
    border = n // _BLOCK * _BLOCK
    blocks = corrected[:border].view(-1, _BLOCK), corrected[border:].view(1, -1)
    sums = torch.cat([lane_sums(rows.abs(), _LANES) for rows in blocks]).flatten()
    magnitude = _mean(sums[: max(1, -(-n // _BLOCK))], n)
    payload[:_MAGNITUDE_BYTES] = magnitude.view(torch.uint8)
    bits = [pack((rows < 0).to(torch.uint8), 1).flatten() for rows in blocks]
    payload[_MAGNITUDE_BYTES:] = torch.cat(bits)
    if residual is not None and new_residual is not None:
        error = corrected - torch.where(corrected < 0, -magnitude, magnitude)
        new_residual.copy_(torch.where(error.isfinite(), error, residual))


def decode_signs(payloads: Sequence[Tensor], out: Tensor, alpha: float, add: bool) -> None:
    """Set `out` to alpha times the sum of magnitudes times the vote, or add this to `out`."""
    total = out.new_zeros(1)
    votes = torch.zeros_like(out)
    for payload in payloads:
        magnitude, signs = _message(payload, out.numel())
        total = total + magnitude
        votes = votes + torch.where(magnitude == 0, 0.0, signs)
    # + 0.0 avoids a negative zero where all means are 0, as csrc/sign.cpp does
    values = votes.sign() * (total * alpha + 0.0)
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def _message(payload: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the magnitude, float32 [1], and the signs, float32 [n] of 1 and -1."""
    # a copy, since slices of larger messages may start at odd addresses
    magnitude = payload[:_MAGNITUDE_BYTES].clone().view(torch.float32)
    bits, border = payload[_MAGNITUDE_BYTES:], n // _BLOCK * _BLOCK
    blocks = [
        unpack(bits[: border // 8].view(-1, _BLOCK // 8), 1, _BLOCK),
        unpack(bits[border // 8 :].view(1, -1), 1, n - border),
    ]
    codes = torch.cat([rows.flatten() for rows in blocks])
    return magnitude, 1.0 - 2.0 * codes.to(torch.float32)


def _mean(sums: Tensor, n: int) -> Tensor:
    """Return the mean, float32 [1], of n elements from the sums of their blocks.

    The sums are folded in float64: while there are m > 1 sums, sum i + ceil(m / 2) is added to
    sum i. A mean below 2**-126 becomes 0, and a mean that is not finite becomes NaN.
    """
    sums = sums.to(torch.float64)
    while len(sums) > 1:
        lower, upper = sums.split([-(-len(sums) // 2), len(sums) // 2])
        sums = lower + torch.nn.functional.pad(upper, (0, len(lower) - len(upper)))
    mean = (sums / torch.full_like(sums, max(n, 1))).to(torch.float32)
    mean = mean.masked_fill(mean < _SMALLEST, 0.0)
    return mean.masked_fill(~mean.isfinite(), torch.nan)


def _mean_words(sums: Tensor, counts: Tensor) -> Tensor:
    """Return sums / counts (both float32), rounded to the nearest bfloat16, as bits: int16.

    A mean of no elements is 0. A magnitude below 2**-126 becomes 0, so that hosts that flush
    subnormals decode the same values. A mean that is not finite, or too large, becomes NaN.
    """
    means = sums / counts.clamp_min(1.0)
    rounded = means.to(torch.bfloat16)
    words = rounded.view(torch.int16).masked_fill(means.abs() < _SMALLEST, 0)
    return words.masked_fill(~rounded.isfinite(), NOT_FINITE)


_ENCODE = kernel(
    "sign_encode",
    "threads(x), Tensor x, Tensor? residual, Tensor(a!)? new_residual, size(x), Tensor(b!) sums, "
    "Tensor(c!) payload",
)
_DECODE = kernel(
    "sign_decode",
    "threads(out), Tensor[] payloads, size(payloads), size(out), float alpha, bool add, "
    "Tensor(a!) out",
)
