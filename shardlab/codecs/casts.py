"""Casts to a shorter float: `bf16`."""

from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey
from shardlab.kernels import casts


class BFloat16(Codec):
    """C(x) = x rounded to bfloat16, to nearest even. 16 bits per element.

    Biased, relative error at most 2^-8 per element for normal numbers; a contraction with
    delta >= 1 - 2^-16. Wire: n bfloat16, little endian. Payloads are not summed on the wire, since
    that would round once per rank.
    """

    name = "bf16"
    unbiased = False

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return 2 * n

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(n, 0, 0)

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        return casts.BF16.encode(vector, casts.GROUP, payload=out)

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return casts.BF16.encode_residual(vector, residual, kept, casts.GROUP, payload=out)

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self._check_payload(payload, out.numel())
        casts.BF16.decode_add(payload, casts.GROUP, out, alpha)
