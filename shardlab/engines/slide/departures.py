"""How gradients leave the device."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from shardlab.comm.collective import Collective
from shardlab.engines.common.outgoing import Outgoing
from shardlab.engines.slide.copies import Copies
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.landings import Landings, Turn
from shardlab.engines.slide.unit import SlidUnit
from shardlab.engines.slide.updates import Updates
from shardlab.transport.background import Running

_PARTS = 4
"""that a unit leaves in, about: more would cost the training thread what they hide"""


@dataclass
class _Leaving:
    """A unit that leaves."""

    unit: SlidUnit
    vector: Tensor
    turn: Turn
    taken: list[slice] = field(default_factory=list)
    """parts of the vector that are filled"""
    arrived: Running | None = None
    """moves the last of them"""


class Departures:
    """Moves the gradients of units to host memory, one unit after another.

    Args:
        reduce: ranks reduce on the device, when all gradients of a unit are there, and each copies
            its chunk of the mean; None: each copies its whole vector, in parts as they are there.
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
        self._leaving: _Leaving | None = None
        self._waiting = 0
        """gradients of the next unit that nobody has looked for yet"""

    def advance(self, unit: SlidUnit) -> None:
        """One more gradient of the unit that leaves next is there; `start` takes the rest."""
        self._waiting += 1
        if _PARTS * self._waiting >= len(unit.shapes):
            self._collect(unit)

    def start(self, unit: SlidUnit, first: bool, last: bool) -> None:
        """Takes the gradients of the unit: what is there, and zeros for what is not.

        Args:
            first, last: whether these are of the first and of the last micro-batch of a step.
        """
        leaving = self._collect(unit)
        self._leaving = None
        for gap in _between(leaving.taken, unit.size):
            leaving.vector[gap].zero_()
            self._take(leaving, gap)
        if self._reduce is not None:
            move = self._faults.watched(self._reduce_and_move)
            leaving.arrived = self._copies.start_out(move, unit, leaving.vector, leaving.turn)
        assert leaving.arrived is not None, "the last gradient of a unit has not left before"
        self._outgoing.leaving(leaving.vector, leaving.arrived)
        self._updates.landed(unit, leaving.arrived, leaving.turn, first, last)

    def _collect(self, unit: SlidUnit) -> _Leaving:
        if self._leaving is None:
            vector = self._outgoing.take(unit.size)
            self._leaving = _Leaving(unit, vector, self._landings.turn(unit))
        assert self._leaving.unit is unit, "one unit leaves after another"
        self._waiting = 0
        for part in unit.collect(self._leaving.vector):
            self._take(self._leaving, part)
        return self._leaving

    def _take(self, leaving: _Leaving, part: slice) -> None:
        """A part of the vector is filled."""
        leaving.taken.append(part)
        if self._reduce is None:
            given = leaving.turn, part, leaving.vector[part], leaving.arrived
            leaving.arrived = self._copies.start_out(self._faults.watched(self._move), *given)

    def _move(self, turn: Turn, part: slice, source: Tensor, before: Running | None) -> None:
        if before is not None:
            before.wait()  # has ended, perhaps with an error
        self._landings.wait(turn)
        self._copies.copy(turn.own[part], source)

    def _reduce_and_move(self, unit: SlidUnit, vector: Tensor, turn: Turn) -> None:
        assert self._reduce is not None
        chunk = torch.empty(unit.chunk, dtype=self._dtype, device=self._device)
        self._reduce.reduce_scatter(chunk, vector, 1 / self._reduce.world_size, unit.message)
        self._landings.wait(turn)
        self._copies.copy(turn.own[unit.own], chunk)


def _between(parts: Sequence[slice], size: int) -> Iterator[slice]:
    """What is left of a vector."""
    edges = sorted((part.start, part.stop) for part in parts)
    for (_, begin), (end, _) in pairwise([(0, 0), *edges, (size, size)]):
        if begin < end:
            yield slice(begin, end)
