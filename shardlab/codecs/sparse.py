"""Sparse selections: `topk`."""

import numpy as np
import torch
from torch import Tensor

from shardlab.codecs.base import Codec, Content, MessageKey


class TopK(Codec):
    """Keeps the k = max(1, round(density * n)) elements of largest magnitude.

    Stich et al. 2018 (definition 2.1): biased, a contraction with delta >= k/n, so it needs error
    feedback. Ties go to the lower index. Not linear: every sender keeps other elements.

    Wire: k float32 values in order of their index, then the indices, as whichever is smaller of
    k uint32 or a bitmap of ceil(n/8) bytes (bit i % 8 of byte i // 8, lowest bit first); all little
    endian. n and k decide which, so no flag is sent.

    Args:
        density: share of the elements that is kept, above 0 and at most 1.
    """

    name = "topk"
    unbiased = False

    def __init__(
        self, density: float = 0.01, values: str = "fp32", indices: str = "smaller"
    ) -> None:
        self.density = density

    def payload_bytes(self, n: int) -> int:  # noqa: D102
        k = self._kept(n)
        return 4 * k + self._index_bytes(n, k)

    def content(self, n: int, payload: Tensor) -> Content:  # noqa: D102
        k = self._kept(n)
        return Content(k, self._index_bytes(n, k), 0)

    def encode(  # noqa: D102
        self, vector: Tensor, key: MessageKey | None = None, out: Tensor | None = None
    ) -> Tensor:
        n = vector.numel()
        k = self._kept(n)
        index = _largest(vector.abs(), k)
        values = vector[index].view(torch.uint8)
        if self._index_bytes(n, k) < 4 * k:
            chosen = np.zeros(n, dtype=bool)
            chosen[index.numpy(force=True)] = True
            places = torch.from_numpy(np.packbits(chosen, bitorder="little")).to(vector.device)
        else:
            places = index.to(torch.int32).view(torch.uint8)
        return torch.cat([values, places], out=out)

    def decode_add(  # noqa: D102
        self, payload: Tensor, out: Tensor, alpha: float = 1.0, key: MessageKey | None = None
    ) -> None:
        n = out.numel()
        self._check_payload(payload, n)
        k = self._kept(n)
        values = payload[: 4 * k].view(torch.float32)
        places = payload[4 * k :]
        if self._index_bytes(n, k) < 4 * k:
            bits = np.unpackbits(places.numpy(force=True), count=n, bitorder="little")
            index = torch.from_numpy(np.flatnonzero(bits)).to(out.device)
        else:
            index = places.view(torch.int32).long()
        if index.numel() != k or (k and int(index.max()) >= n):
            raise ValueError(f"{self.name}: the payload's indices are damaged")
        out.index_add_(0, index, values, alpha=alpha)

    def _kept(self, n: int) -> int:
        return min(n, max(1, round(self.density * n)))

    @staticmethod
    def _index_bytes(n: int, k: int) -> int:
        return min(4 * k, (n + 7) // 8)


def _largest(magnitude: Tensor, k: int) -> Tensor:
    """Indices of the k largest elements in ascending order; ties go to the lower index."""
    if k == 0:
        return torch.empty(0, dtype=torch.long, device=magnitude.device)
    smallest_kept = torch.topk(magnitude, k, sorted=False).values.min()
    above = torch.nonzero(magnitude > smallest_kept).flatten()
    equal = torch.nonzero(magnitude == smallest_kept).flatten()[: k - above.numel()]
    return torch.cat([above, equal]).sort().values
