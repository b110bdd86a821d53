"""A codec of your own in plain PyTorch: -1, 0 or 1 times one scale per group, 2 bits per element.

In a script: `import user_codecs.ternary`, then `shardlab.attach(model, "ternary:group=64")`.
In an experiment: add `codecs: [user_codecs.ternary]` to params.yaml and write
`gradients: {codec: "ternary:group=64", error_feedback: true}` in a strategy.
"""

from typing import Literal

import torch
from torch import Tensor

import shardlab
from shardlab.codecs.grouped import GroupedCodec
from shardlab.codecs.scales import head_bytes, read_scales, scale_words, widened
from shardlab.strategy.codec_options import GroupSize


class TernarySpec(shardlab.CodecSpec):
    """The sign of elements above half the largest magnitude of their group, 0 for the others."""

    examples = ("ternary", "ternary:group=64")

    name: Literal["ternary"] = "ternary"
    group: GroupSize = 128
    """elements that share one scale"""


class Ternary(GroupedCodec):
    """C(x)_i = s * round(x_i / s), s = max|x| in a group, rounded up to bfloat16.

    2 + 16/group bits per element. Biased, |x_i - C(x)_i| <= s/2, a contraction: use error feedback.
    Not linear. Wire: a scale per group, then codes 0, 1 and 2 for -1, 0 and 1
    (`shardlab.codecs.grouped`).
    """

    name = "ternary"
    unbiased = False
    head_bytes = 2
    bits = 2

    def __init__(self, group: int = 128) -> None:
        super().__init__(group)

    def quantize(self, rows: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: D102
        words = scale_words(rows, 1)
        scale = widened(words)
        # a scale of NaN, of a group that is not finite, makes every comparison false: code 1
        positive, negative = rows > scale / 2, rows < -scale / 2
        return head_bytes(words), 1 + positive.to(torch.uint8) - negative.to(torch.uint8)

    def dequantize(self, heads: Tensor, codes: Tensor) -> Tensor:  # noqa: D102
        return read_scales(heads) * (codes.float() - 1)


shardlab.register("ternary", TernarySpec, Ternary)
