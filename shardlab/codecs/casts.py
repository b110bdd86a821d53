"""Casts to a shorter float: `bf16`."""

from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey
from shardlab.kernels import bf16


class BFloat16(Codec):
    """C(x) = x rounded to bfloat16, to nearest even. 16 bits per element.

    Biased, relative error at most 2^-8 per element for normal numbers; a contraction with
    delta >= 1 - 2^-16. Wire: n bfloat16, little endian. Payloads are not summed on the wire, since
    that would round once per rank.
    """

    name = "bf16"
    unbiased = False
    linear = False

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return bf16.payload_bytes(n)

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(n, 0, 0)

    def encode(self, vector: Tensor, key: MessageKey | None = None) -> Tensor:  # noqa: D102
        return bf16.encode(vector)

    def encode_residual(  # noqa: D102
        self, vector: Tensor, residual: Tensor, key: MessageKey | None = None
    ) -> Tensor:
        return bf16.encode_residual(vector, residual)

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:  # noqa: D102
        self._check_payload(payload, out.numel())
        bf16.decode_add(payload, out, alpha)
