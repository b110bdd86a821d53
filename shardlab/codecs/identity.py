"""`none`: float32 as it is. The trivial codec, so that the baseline takes the same path."""

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey


class Identity(Codec):
    """C(x) = x. 32 bits per element, exact, linear.

    Wire: n float32, little endian.
    """

    name = "none"
    unbiased = True
    linear = True

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return 4 * n

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(n, 0, 0)

    def encode(self, vector: Tensor, key: MessageKey | None = None) -> Tensor:
        """A view of the vector's own memory: nothing is copied."""
        return vector.view(torch.uint8)

    def encode_residual(  # noqa: D102
        self, vector: Tensor, residual: Tensor, key: MessageKey | None = None
    ) -> Tensor:
        payload = (vector + residual).view(torch.uint8)
        residual.zero_()
        return payload

    def decode_add(self, payload: Tensor, out: Tensor, alpha: float = 1.0) -> None:  # noqa: D102
        self._check_payload(payload, out.numel())
        out.add_(payload.view(torch.float32), alpha=alpha)
