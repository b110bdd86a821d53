"""Vectors of gradients that are on their way while backward goes on."""

from collections import deque

import torch
from torch import Tensor

from shardlab.transport.background import Running

_MOST = 2
"""vectors under way: with fewer, backward waits for each; more would only take memory"""


class Outgoing:
    """Gives out vectors, as few as are under way at a time, and uses them again.

    Memory allocated anew for each would lie between the holes that others leave.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._running: deque[tuple[Running, Tensor]] = deque()
        self._spare: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        """A vector of so many elements, whatever is in it; waits while too many are under way."""
        while len(self._running) >= _MOST:
            self._settle()
        spare = self._spare.setdefault(size, [])
        return spare.pop() if spare else torch.empty(size, dtype=self._dtype, device=self._device)

    def leaving(self, vector: Tensor, running: Running) -> None:
        """What was taken can be used again when the call has ended."""
        self._running.append((running, vector))

    def drain(self) -> None:
        """Returns when none is under way; raises the error of the first call that has one."""
        while self._running:
            self._settle()

    def _settle(self) -> None:
        """Waits for the oldest."""
        running, vector = self._running.popleft()
        running.wait()
        self._spare[vector.numel()].append(vector)
