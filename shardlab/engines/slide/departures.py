"""How gradients leave the device."""

import torch
from torch import Tensor

from shardlab.comm.collective import Collective
from shardlab.engines.outgoing import Outgoing
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.unit import SlidUnit
from shardlab.engines.slide.updates import Updates


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
        self._outgoing = Outgoing(dtype, device)
        self._landings: dict[int, Tensor] = {}

    def start(self, unit: SlidUnit, first: bool, last: bool) -> None:
        """Takes the gradients of the unit.

        Args:
            first, last: whether these are of the first and of the last micro-batch of a step.
        """
        vector = self._outgoing.take(unit.size)
        unit.collect(vector)
        target = unit.slot if first else self._landing(vector)
        arrived = self._copies.start_out(self._faults.watched(self._move), unit, vector, target)
        landed = self._updates.landed(unit, arrived, None if first else target, last)
        self._outgoing.leaving(vector, arrived if first else landed)

    def _move(self, unit: SlidUnit, vector: Tensor, target: Tensor) -> None:
        if self._reduce is None:
            self._copies.copy(target, vector)
            return
        chunk = torch.empty(unit.chunk, dtype=self._dtype, device=self._device)
        self._reduce.reduce_scatter(chunk, vector, 1 / self._reduce.world_size, unit.message)
        self._copies.copy(target[unit.own], chunk)

    def _landing(self, vector: Tensor) -> Tensor:
        """Main memory beside a vector, for gradients that are added to earlier ones."""
        landing = self._landings.get(vector.data_ptr())
        if landing is None:
            landing = torch.empty_like(vector, device="cpu")
            self._copies.pin(landing)
            self._landings[vector.data_ptr()] = landing
        return landing
