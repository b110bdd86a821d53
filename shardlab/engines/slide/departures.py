"""How gradients leave the device."""

import torch
from torch import Tensor

from shardlab.comm.collective import Collective
from shardlab.engines.outgoing import Outgoing
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.landings import Landings, Turn
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
        landings: Landings,
        updates: Updates,
        faults: Faults,
        reduce: Collective | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._copies, self._updates, self._faults = copies, updates, faults
        self._landings, self._reduce = landings, reduce
        self._dtype, self._device = dtype, device
        self._outgoing = Outgoing(dtype, device)

    def start(self, unit: SlidUnit, first: bool, last: bool) -> None:
        """Takes the gradients of the unit.

        Args:
            first, last: whether these are of the first and of the last micro-batch of a step.
        """
        vector = self._outgoing.take(unit.size)
        unit.collect(vector)
        turn = self._landings.turn(unit)
        arrived = self._copies.start_out(self._faults.watched(self._move), unit, vector, turn)
        self._outgoing.leaving(vector, arrived)
        self._updates.landed(unit, arrived, turn, first, last)

    def _move(self, unit: SlidUnit, vector: Tensor, turn: Turn) -> None:
        if self._reduce is None:
            self._landings.wait(turn)
            self._copies.copy(turn.own, vector)
            return
        chunk = torch.empty(unit.chunk, dtype=self._dtype, device=self._device)
        self._reduce.reduce_scatter(chunk, vector, 1 / self._reduce.world_size, unit.message)
        self._landings.wait(turn)
        self._copies.copy(turn.own[unit.own], chunk)
