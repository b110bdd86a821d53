"""The gradient of a rank's chunk of a unit, of what ranks and micro-batches let arrive."""

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from shardlab.buffers.slide import Keeping
from shardlab.comm.collective import Collective
from shardlab.comm.ledger import Ledger
from shardlab.engines.slide.arrivals import UPDATED, share_in_memory
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.landings import TAKEN, Turn
from shardlab.engines.slide.ranks import Ranks
from shardlab.engines.slide.unit import SlidUnit, own_of

LANDED = "landed"
"""published by each rank of a node when others may add up what it has of a unit"""


class Sums:
    """Adds up gradients over ranks, micro-batches and nodes, in float32 and the order of ranks.

    Args:
        ranks: those of a node may add up each other's vectors.
        reduce_scatter: of this rank's vector with the others', by messages; None where they do, or
            where what arrives is the mean already.
        average: between nodes, of what is there then.
        ledger: counts what ranks leave for each other in host memory.
    """

    def __init__(
        self,
        control: Control,
        ranks: Ranks,
        keeping: Keeping,
        reduce_scatter: Collective | None,
        average: Collective | None,
        ledger: Ledger,
    ) -> None:
        self._control, self._ledger = control, ledger
        self._ranks, self._keeping = ranks, keeping
        self._reduce, self._average = reduce_scatter, average

    def take(
        self, unit: SlidUnit, turn: Turn, first: bool, last: bool, scale: float
    ) -> list[Tensor]:
        """Takes in what has arrived.

        Args:
            first, last: whether it is of the first and of the last micro-batch of a step.
            scale: what the sum is multiplied by to be the gradient.

        Returns:
            of the last micro-batch, what adds up to this rank's chunk of the sum, in this order.
        """
        if self._keeping == "sums":
            if first:  # others may still apply what is there, if this rank has not used the unit
                self._control.wait(UPDATED, unit.index, turn.updates)
            _add(unit.slot, [turn.own], first)
            self._control.publish(TAKEN, unit.index, turn.number)
            parts = self._over_ranks(unit, unit.slots, turn.number, scale) if last else []
        else:
            parts = self._over_ranks(unit, turn.vectors, turn.number, scale)
        if self._keeping == "totals":
            total = unit.slot[unit.own]
            _add(total, parts, first)
            self._control.publish(TAKEN, unit.index, turn.number)
            parts = [total]
        if last and self._average is not None:
            total = _sum(parts)
            self._average.all_reduce(total, 1.0, unit.between_nodes)
            parts = [total]
        return parts

    def _over_ranks(
        self, unit: SlidUnit, vectors: Sequence[Tensor], number: int, scale: float
    ) -> list[Tensor]:
        """What adds up to the sum over ranks, or the mean, of this rank's chunk."""
        own = own_of(vectors, self._ranks.rank)
        if self._ranks.sums:
            self._control.publish(LANDED, unit.index, number)
            share_in_memory(self._ledger.accounts["gradients"], own, self._ranks.world_size)
            self._control.wait(LANDED, unit.index, number)
            parts = [vector[unit.own] for vector in vectors]
            self._audit(parts, scale)
            return parts
        if self._reduce is not None:
            mean = torch.empty(unit.chunk, dtype=own.dtype)
            self._reduce.reduce_scatter(mean, own, 1 / self._ranks.world_size, unit.message)
            own[unit.own].copy_(mean)
        return [own[unit.own]]

    def _audit(self, parts: Sequence[Tensor], scale: float) -> None:
        """What is added up here is exact."""
        if self._ledger.audit is not None:
            mean = _sum(parts) * scale
            self._ledger.audit.add(mean, mean)


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """Of vectors of any type, in their order; a single vector of float32 is its own sum."""
    return reduce(torch.add, parts[1:], parts[0].float())


def _add(total: Tensor, parts: Sequence[Tensor], first: bool) -> None:
    """The total, of float32, grows by the sum of the parts, or begins with it."""
    if first:
        total.copy_(_sum(parts))
    else:
        total.add_(_sum(parts))
