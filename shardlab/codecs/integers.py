"""Integers with a scale per group: `int8`."""

from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey
from shardlab.kernels import int8


class Int8(Codec):
    """q_i = round(x_i / s) to nearest even, s = max|x| / 127 in a group, s rounded up to bfloat16.

    8 + 16/group bits per element; biased, |x_i - D_i| <= s/2. The group-wise symmetric quantizer of
    ZeRO++ (Wang et al. 2023, section 3.1). Not linear: every sender has its own scales.
    Wire: see `shardlab.kernels.int8`. A group with a value that is not finite decodes to NaN.

    Args:
        group: elements that share one scale.
    """

    name = "int8"
    unbiased = False

    def __init__(self, group: int = 128, rounding: str = "nearest") -> None:
        self.group = group

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return int8.KERNEL.payload_bytes(n, self.group)

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(n, 0, payload.numel() - n)

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        return int8.KERNEL.encode(vector, self.group, payload=out)

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        return int8.KERNEL.encode_residual(vector, residual, kept, self.group, payload=out)

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self._check_payload(payload, out.numel())
        int8.KERNEL.decode_add(payload, self.group, out, alpha)
