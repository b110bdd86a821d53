"""Uncompressed float32: `none`, with which a baseline runs the same code as compression does."""

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, MessageKey, PayloadContent


class Identity(Codec):
    """C(x) = x. 32 bits per element, exact, linear.

    Wire: n float32, little endian.
    """

    name = "none"
    unbiased = True
    linear = True

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return 4 * n

    def content(self, n: int, payload: Tensor) -> PayloadContent:  # noqa: D102
        return PayloadContent(n, 0, 0)

    def encode(
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Return the bytes of the vector: a view of it, or a copy in `out`."""
        payload = vector.view(torch.uint8)
        return payload if out is None else out.copy_(payload)

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        new_residual: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        buffer = None if out is None else out.view(torch.float32)
        payload = torch.add(vector, residual, out=buffer).view(torch.uint8)
        new_residual.zero_()
        return payload

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self._check_payload(payload, out.numel())
        out.add_(payload.view(torch.float32), alpha=alpha)
