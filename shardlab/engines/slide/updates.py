"""What is done to gradients in main memory: they are added up, measured and applied."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.comm.background import Background, Running
from shardlab.comm.collective import Collective, add_up
from shardlab.comm.ledger import Ledger
from shardlab.engines.slide.arrivals import UPDATED, share_in_memory
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.moments import MomentStore
from shardlab.engines.slide.unit import SlidUnit
from shardlab.kernels.adam import Hyper, adam_, sum_of_squares
from shardlab.kernels.workers import Workers

LANDED = "landed"
"""published by each rank of a node when its gradients of a unit are in its slot"""


class Updates:
    """A thread that waits for gradients and updates this rank's chunk of their unit.

    Args:
        sums: over the slots of all ranks, in the order of ranks.
        reduce: of this rank's slot with the others', by messages; None where what lands is summed
            here, or is the mean already.
        average: between nodes, of what is there then.
        ledger: counts what ranks leave for each other in slots.
        order: in which units are updated step after step, as a rule: moments come one unit ahead.
        seed: of the run, for what is rounded by chance.
    """

    def __init__(
        self,
        control: Control,
        faults: Faults,
        world_size: int,
        sums: bool,
        reduce: Collective | None,
        average: Collective | None,
        ledger: Ledger,
        workers: Workers | None,
        moments: MomentStore,
        order: Sequence[SlidUnit],
        seed: int,
    ) -> None:
        self.hyper = Hyper(0.0)
        """of the updates that are started from now on"""
        self.scale = 1.0
        """what the sum over slots is multiplied by to be the gradient"""
        self._control, self._faults, self._ledger = control, faults, ledger
        self._workers, self._moments, self._seed = workers, moments, seed
        self._following = dict(zip(order, [*order[1:], order[0]], strict=True))
        self._world_size = world_size
        self._sums, self._reduce, self._average = sums, reduce, average
        self._lane = Background("update")
        self._squares: dict[int, float] = {}
        self._last: Running | None = None
        self._steps = 0

    def begin(self) -> None:
        """Before the first gradient of a step."""
        self._moments.check()
        self._steps += 1
        self._squares.clear()

    def landed(self, unit: SlidUnit, arrived: Running, more: Tensor | None, last: bool) -> Running:
        """Takes in what arrives.

        Args:
            more: what is to be added to the slot; None where it arrives in the slot itself.
            last: no more comes in this step.
        """
        self._last = self._lane.start(
            self._faults.watched(self._land),
            unit,
            arrived,
            more,
            self._steps if last else None,
            self.scale,
        )
        return self._last

    def squares(self) -> float:
        """The sum of the squares of this rank's part of the gradient, when all of it is there."""
        if self._last is not None:
            self._last.wait()
        return math.fsum(self._squares.values())

    def start(self, unit: SlidUnit, coefficient: float = 1.0) -> None:
        """Updates the unit with its gradient times the coefficient."""
        unit.updates += 1
        unit.step += 1
        numbers = unit.updates, int(unit.step)
        update = self._faults.watched(self._update)
        self._lane.start(update, unit, *numbers, self.hyper, self.scale * coefficient)

    def drain(self) -> None:
        """Returns when all updates are done; raises the error of the first one that has one."""
        self._lane.drain()
        self._moments.drain()

    def _land(
        self,
        unit: SlidUnit,
        arrived: Running,
        more: Tensor | None,
        step: int | None,
        scale: float,
    ) -> None:
        arrived.synchronize()
        slot = unit.slot
        if more is not None:
            # of what was reduced on the device only this rank's chunk has arrived
            own = slice(None) if self._sums or self._reduce or self._world_size == 1 else unit.own
            slot[own].add_(more[own])
        if step is None:
            return
        unit.total = None
        if self._sums:
            self._control.publish(LANDED, unit.index, step)
            share_in_memory(self._ledger.accounts["gradients"], slot, self._world_size)
            self._control.wait(LANDED, unit.index, step)
            self._audit(unit, scale)
        elif self._reduce is not None:
            mean = torch.empty(unit.chunk, dtype=slot.dtype)
            self._reduce.reduce_scatter(mean, slot, 1 / self._world_size, unit.message)
            slot[unit.own].copy_(mean)
        if self._average is not None:
            self._sum_nodes(unit, self._average)
        squares = sum_of_squares(self._gradients(unit), scale, unit.first, self._workers)
        self._squares[unit.index] = squares

    def _sum_nodes(self, unit: SlidUnit, average: Collective) -> None:
        """The sum over nodes of what this rank and its like would apply alone."""
        parts = [part.float() for part in self._gradients(unit)]
        total = torch.empty(unit.chunk)
        add_up(parts, total, 1.0)
        average.all_reduce(total, 1.0, unit.between_nodes)
        unit.total = total

    def _audit(self, unit: SlidUnit, scale: float) -> None:
        """What is added up here is exact."""
        if self._ledger.audit is not None:
            mean = torch.empty(unit.chunk)
            add_up([part.float() for part in self._gradients(unit)], mean, scale)
            self._ledger.audit.add(mean, mean)

    @torch.no_grad()
    def _update(self, unit: SlidUnit, number: int, step: int, hyper: Hyper, scale: float) -> None:
        moments = self._moments.load(unit.name)
        self._moments.prefetch(self._following[unit].name)
        mirror = unit.vectors["mirror"][unit.own] if unit.narrow else None
        adam_(
            unit.vectors["parameter"][unit.own],
            *moments,
            self._gradients(unit),
            hyper,
            step,
            scale,
            mirror,
            # neither of these depends on the number of ranks
            seed=_seed(self._seed, unit.name),
            offset=unit.first,
            workers=self._workers,
        )
        self._control.publish(UPDATED, unit.index, number)
        self._moments.store(unit.name)

    def _gradients(self, unit: SlidUnit) -> list[Tensor]:
        """Of this rank's chunk: what it adds up, in the order of ranks, or the sum or mean."""
        if unit.total is not None:
            return [unit.total]
        slots = unit.slots if self._sums else [unit.slot]
        return [slot[unit.own] for slot in slots]


def _seed(run: int, unit: str) -> int:
    digest = hashlib.blake2b(f"{run}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
