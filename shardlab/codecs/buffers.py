"""Buffers that are kept from message to message: fresh memory costs more than encoding into it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.codecs.envelope import HEADER

_LINE = 64
"""bytes of a cache line"""


class Buffers:
    """One growing buffer per purpose; it holds what it holds until it is asked for again."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.device], Tensor] = {}

    def bytes(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """uint8 [size], with anything in it, starting at a cache line."""
        kept = self._kept.get((purpose, device))
        if kept is None or kept.numel() < size:
            kept = self._kept[purpose, device] = torch.empty(size, dtype=torch.uint8, device=device)
        return kept[:size]

    def floats(self, purpose: str, size: int, device: torch.device) -> Tensor:
        """float32 [size], with anything in it."""
        return self.bytes(purpose, 4 * size, device).view(torch.float32)

    def messages(self, purpose: str, sizes: Sequence[int], device: torch.device) -> list[Tensor]:
        """Room for messages of these sizes, whose payloads (behind a header) start at a cache line.

        Kernels write whole lines faster than parts of two.
        """
        starts, end = [], _LINE - HEADER
        for size in sizes:
            starts.append(end)
            end += -(-size // _LINE) * _LINE
        room = self.bytes(purpose, end, device)
        return [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]
