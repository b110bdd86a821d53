"""Base of the codecs over a grouped format."""

from collections.abc import Sequence

from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey, key_words
from shardlab.codecs.kernels.grouped import GroupedKernel


class GroupedCodec(Codec):
    """Codec over a `GroupedKernel`: heads are metadata, codes elements.

    Args:
        kernel: of the format; a random one needs the key of the message.
        group: elements that share a head.
    """

    def __init__(self, kernel: GroupedKernel, group: int) -> None:
        self.kernel = kernel
        self.format = kernel.format.name
        self.group = group

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return self.kernel.payload_bytes(n, self.group)

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(n, 0, self.kernel.format.head_bytes * -(-n // self.group))

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        return self.kernel.encode(vector, self.group, self._words(key), out)

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        words = self._words(key)
        return self.kernel.encode_residual(vector, residual, kept, self.group, words, out)

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self._check_payload(payload, out.numel())
        self.kernel.decode_add(payload, self.group, out, alpha)

    def decode_sum(  # noqa: D102
        self,
        payloads: Sequence[Tensor],
        out: Tensor,
        alpha: float = 1.0,
        keys: Sequence[MessageKey] | None = None,
    ) -> None:
        for payload in payloads:
            self._check_payload(payload, out.numel())
        self.kernel.decode_sum(payloads, self.group, out, alpha)

    def _words(self, key: MessageKey | None) -> tuple[int, int]:
        return key_words(key, self.name) if self.kernel.format.random else (0, 0)
