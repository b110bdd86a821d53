"""How gradients leave the device."""

from collections import deque

import torch
from torch import Tensor

from shardlab.comm.background import Running
from shardlab.comm.collective import Collective
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.unit import SlidUnit
from shardlab.engines.slide.updates import Updates

_ON_THEIR_WAY = 2
"""vectors of gradients that wait on the device while backward goes on"""


class Departures:
    """Moves the gradients of a unit to main memory when all of them are there.

    Args:
        reduce: ranks reduce on the device and each copies its chunk of the mean; None: each copies
            its whole vector.
        dtype: of gradients on their way.
    """

    def __init__(
        self,
        copies: Copies,
        updates: Updates,
        faults: Faults,
        reduce: Collective | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._copies, self._updates, self._faults = copies, updates, faults
        self._reduce = reduce
        self._dtype, self._device = dtype, device
        self._running: deque[tuple[Running, Tensor]] = deque()
        self._vectors: dict[int, list[Tensor]] = {}
        self._landings: dict[int, Tensor] = {}

    def start(self, unit: SlidUnit, first: bool, last: bool) -> None:
        """Takes the gradients of the unit.

        Args:
            first, last: whether these are of the first and of the last micro-batch of a step.
        """
        while len(self._running) >= _ON_THEIR_WAY:
            self._settle()
        kept = self._vectors.setdefault(unit.size, [])
        vector = kept.pop() if kept else self._new(unit.size)
        unit.collect(vector)
        target = unit.slot if first else self._landing(vector)
        arrived = self._copies.start_out(self._faults.watched(self._move), unit, vector, target)
        landed = self._updates.landed(unit, arrived, None if first else target, last)
        self._running.append((arrived if first else landed, vector))

    def _move(self, unit: SlidUnit, vector: Tensor, target: Tensor) -> None:
        if self._reduce is None:
            self._copies.copy(target, vector)
            return
        chunk = torch.empty(unit.chunk, dtype=self._dtype, device=self._device)
        self._reduce.reduce_scatter(chunk, vector, 1 / self._reduce.world_size, unit.message)
        self._copies.copy(target[unit.own], chunk)

    def _new(self, size: int) -> Tensor:
        return torch.empty(size, dtype=self._dtype, device=self._device)

    def _landing(self, vector: Tensor) -> Tensor:
        """Main memory beside a vector, for gradients that are added to earlier ones."""
        landing = self._landings.get(vector.data_ptr())
        if landing is None:
            landing = torch.empty_like(vector, device="cpu")
            self._copies.pin(landing)
            self._landings[vector.data_ptr()] = landing
        return landing

    def _settle(self) -> None:
        """Waits for the oldest vector."""
        running, vector = self._running.popleft()
        running.wait()
        self._vectors[vector.numel()].append(vector)
