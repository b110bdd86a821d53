"""Elements at random positions that all ranks share: `randomk`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.base import FusedCodec, MessageKey, PayloadContent, key_words
from shardlab.codecs.selection import scatter_add, scatter_sum, write_residual
from shardlab.codecs.sparse import VALUE_CODECS, decoded_values
from shardlab.kernels.compiled import compiled_on_gpus
from shardlab.kernels.random import random_bits


class RandomK(FusedCodec):
    """Selection of k = max(1, round(density * n)) random elements, without replacement.

    Stich et al. 2018 (definition 2.1). All ranks draw the same positions from the key, so indices
    are not sent: 32 * density bits per element, and payloads of float32 can be summed before they
    are decoded. Other formats of values take fewer bits, as in `shardlab.codecs.sparse`.

    Every element is drawn with probability k/n (`random_positions`). Unscaled values are therefore
    a contraction in the mean with delta = k/n; use them with error feedback. Values scaled by n/k
    are unbiased with variance (n/k - 1) ||x||^2; with error feedback they diverge.

    Wire: the k values in ascending order of their positions, as a payload of the value codec. If
    any of the n elements is not finite, all k values are NaN, since the element may not be drawn.

    Args:
        density: Fraction of the elements that is sent, above 0 and at most 1.
        scaled: Multiply values by n/k.
        values: Format of the values: fp32, fp16, bf16, int8 or int4.
    """

    name = "randomk"
    random = random_elements = True

    def __init__(self, density: float = 0.01, scaled: bool = False, values: str = "fp32") -> None:
        self.density = density
        self.scaled = self.unbiased = scaled
        self.values = VALUE_CODECS[values]()
        self.linear = values == "fp32"

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        return self.values.payload_bytes(self._elements_sent(n))

    def content(self, n: int, payload: Tensor) -> PayloadContent:  # noqa: D102
        k = self._elements_sent(n)
        return PayloadContent(k, 0, self.values.content(k, payload).metadata_bytes)

    def write(  # noqa: D102
        self,
        x: Tensor,
        residual: Tensor | None,
        new_residual: Tensor | None,
        key: MessageKey | None,
        payload: Tensor,
    ) -> Tensor:
        self._check_written(x, residual, new_residual, payload)
        positions = self._positions(x, key)
        corrected = x if residual is None else x + residual
        drawn = corrected[positions]
        sent = drawn.masked_fill(~corrected.isfinite().all(), float("nan"))
        if self.scaled and drawn.numel():
            sent.mul_(x.numel() / drawn.numel())
        self.values.encode(sent, None, payload)
        if residual is not None and new_residual is not None:
            decoded = decoded_values(self.values, payload, len(drawn), None)
            write_residual(x, residual, new_residual, positions, drawn, decoded)
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
        if not keys:
            key_words(None, self.name)
        drawn = {key: self._positions(out, key) for key in {key.shared() for key in keys or ()}}
        positions = [drawn[key.shared()] for key in keys or ()]
        k = self._elements_sent(out.numel())
        values = [decoded_values(self.values, payload, k, None) for payload in payloads]
        if add:
            scatter_add(values[0], positions[0], out, alpha)
        else:
            scatter_sum(values, positions, out, alpha)

    def _elements_sent(self, n: int) -> int:
        return min(n, max(1, round(self.density * n)))

    def _positions(self, vector: Tensor, key: MessageKey | None) -> Tensor:
        n = vector.numel()
        words = key_words(key.shared() if key else None, self.name)
        return random_positions(n, self._elements_sent(n), words, vector.device)


def random_positions(n: int, k: int, key: tuple[int, int], device: torch.device) -> Tensor:
    """Return k distinct positions below n < 2**31: int32 [k], ascending.

    [0, n) is cut into k parts, part j from floor(j n / k) to floor((j + 1) n / k). One position is
    drawn in each part, then all positions are shifted by one random amount, modulo n:

        size_j = floor((j + 1) n / k) - floor(j n / k)
        position_j = (floor(j n / k) + floor(bits_j size_j / 2**32) + floor(bits_k n / 2**32)) mod n

    where bits_i are the 32 random bits of element i under the key. With the shift every element has
    the same probability k/n (up to n * 2**-32, since 2**32 is not a multiple of every n). Without
    it an element of a shorter part would be more likely.

    Args:
        key: Words of a key that is the same on all ranks.
    """
    bits = random_bits(k + 1, *key, device)
    return _positions_of(bits, n)


@compiled_on_gpus
def _positions_of(bits: Tensor, n: int) -> Tensor:
    k = bits.numel() - 1
    if not k:
        return bits[:0].to(torch.int32)
    part = torch.arange(k + 1, dtype=torch.int64, device=bits.device) * n // k
    drawn = part[:-1] + (bits[:-1] * part.diff() >> 32)
    shifted = (drawn + (bits[-1] * n >> 32)) % n
    # the shift moved the last positions past n, to the start: rotate them back into order
    order = torch.arange(k, device=bits.device) + shifted.argmin()
    return shifted[order % k].to(torch.int32)
