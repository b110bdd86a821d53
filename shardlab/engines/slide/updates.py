"""What is done to gradients in host memory: they are measured and applied."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.engines.slide.arrivals import UPDATED
from shardlab.engines.slide.control import Control
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.landings import Turn
from shardlab.engines.slide.moments import MomentStore
from shardlab.engines.slide.sums import Sums
from shardlab.engines.slide.unit import SlidUnit
from shardlab.kernels.adam import Hyper, adam_, sum_of_squares
from shardlab.kernels.workers import Workers
from shardlab.transport.background import Background, Running


class Updates:
    """A thread that waits for gradients and updates this rank's chunk of their unit.

    Args:
        sums: make the gradient of what arrives.
        order: in which units are updated step after step, as a rule: moments come one unit ahead.
        seed: of the run, for what is rounded by chance.
    """

    def __init__(
        self,
        control: Control,
        faults: Faults,
        sums: Sums,
        workers: Workers | None,
        moments: MomentStore,
        order: Sequence[SlidUnit],
        seed: int,
    ) -> None:
        self.hyper = Hyper(0.0)
        """of the updates that are started from now on"""
        self.scale = 1.0
        """what the sum over ranks is multiplied by to be the gradient"""
        self._control, self._faults, self._sums = control, faults, sums
        self._workers, self._moments, self._seed = workers, moments, seed
        self._following = dict(zip(order, [*order[1:], order[0]], strict=True))
        self._lane = Background("update")
        self._gradients: dict[int, list[Tensor]] = {}
        """of this rank's chunk of units: what adds up to it"""
        self._squares: dict[int, float] = {}
        self._last: Running | None = None

    def begin(self) -> None:
        """Before the first gradient of a step."""
        self._moments.check()
        self._squares.clear()

    def landed(self, unit: SlidUnit, arrived: Running, turn: Turn, first: bool, last: bool) -> None:
        """Takes in what arrives; the other arguments are as of `Sums.take`."""
        land = self._faults.watched(self._land)
        self._last = self._lane.start(land, unit, arrived, turn, first, last, self.scale)

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
        self, unit: SlidUnit, arrived: Running, turn: Turn, first: bool, last: bool, scale: float
    ) -> None:
        arrived.synchronize()
        parts = self._sums.take(unit, turn, first, last, scale)
        if last:
            self._gradients[unit.index] = parts
            squares = sum_of_squares(parts, scale, unit.first, self._workers)
            self._squares[unit.index] = squares

    @torch.no_grad()
    def _update(self, unit: SlidUnit, number: int, step: int, hyper: Hyper, scale: float) -> None:
        moments = self._moments.load(unit.name)
        self._moments.prefetch(self._following[unit].name)
        mirror = unit.vectors["mirror"][unit.own] if unit.narrow else None
        adam_(
            unit.vectors["parameter"][unit.own],
            *moments,
            self._gradients.pop(unit.index),
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


def _seed(run: int, unit: str) -> int:
    digest = hashlib.blake2b(f"{run}\0{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
