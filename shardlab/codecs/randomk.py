"""Elements at random positions that all ranks share: `randomk`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey, key_words
from shardlab.codecs.kernels import scatter, select
from shardlab.codecs.kernels.random import random_places


class RandomK(Codec):
    """Selection of k = max(1, round(density * n)) random elements, without replacement.

    Stich et al. 2018 (definition 2.1). The positions follow from the key, which all ranks share:
    32 * density bits per element, none of them for indices, and payloads can be summed before they
    are decoded. Every element is drawn with probability k/n (`shardlab.codecs.kernels.random`), from which
    both bounds follow: unscaled, a contraction in the mean with delta = k/n;
    scaled by n/k, unbiased with the variance (n/k - 1) ||x||^2. Scaled values diverge under error
    feedback, where unscaled ones belong.

    Wire: k float32, little endian, in ascending order of their positions. If any of the n elements
    is not finite all k are NaN: a position that is not drawn would hide it.

    Args:
        density: fraction of the elements that is sent, above 0 and at most 1.
        scaled: multiply by n/k.
    """

    name = "randomk"
    linear = True

    def __init__(self, density: float = 0.01, scaled: bool = False) -> None:
        self.density = density
        self.unbiased = scaled

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return 4 * self._kept(n)

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        return Content(self._kept(n), 0, 0)

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        drawn = vector.index_select(0, self._places(vector, key))
        return _as_payload(self._sent(drawn, select.not_finite(vector), vector.numel()), out)

    def encode_residual(  # noqa: D102
        self,
        vector: Tensor,
        residual: Tensor,
        kept: Tensor,
        key: MessageKey | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        apart = kept.data_ptr() != residual.data_ptr()
        places = self._places(vector, key)
        drawn = vector.index_select(0, places) + residual.index_select(0, places)
        bad = select.not_finite(vector, residual, kept if apart else None)
        sent = self._sent(drawn, bad, vector.numel())
        select.keep(None if apart else vector, residual, kept, places, drawn, sent)
        return _as_payload(sent, out)

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        self._check_payload(payload, out.numel())
        scatter.scatter_add(payload.view(torch.float32), self._places(out, key), out, alpha)

    def decode_sum(  # noqa: D102
        self,
        payloads: Sequence[Tensor],
        out: Tensor,
        alpha: float = 1.0,
        keys: Sequence[MessageKey] | None = None,
    ) -> None:
        for payload in payloads:
            self._check_payload(payload, out.numel())
        drawn = {key: self._places(out, key) for key in {key.shared() for key in keys or ()}}
        if not drawn:
            key_words(None, self.name)
        values = [payload.view(torch.float32) for payload in payloads]
        scatter.scatter_sum(values, [drawn[key.shared()] for key in keys or ()], out, alpha)

    def _kept(self, n: int) -> int:
        return min(n, max(1, round(self.density * n)))

    def _places(self, vector: Tensor, key: MessageKey | None) -> Tensor:
        n = vector.numel()
        words = key_words(key.shared() if key else None, self.name)
        return random_places(n, self._kept(n), words, vector.device)

    def _sent(self, drawn: Tensor, bad: Tensor, n: int) -> Tensor:
        """Return what is sent: NaN everywhere if some of the n elements are `bad`."""
        sent = drawn.masked_fill(bad > 0, float("nan"))
        return sent.mul_(n / drawn.numel()) if self.unbiased and drawn.numel() else sent


def _as_payload(values: Tensor, out: Tensor | None) -> Tensor:
    payload = values.view(torch.uint8)
    return payload if out is None else out.copy_(payload)
