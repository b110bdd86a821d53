"""Tasks of a step of `slide`: prefetch, compute, gradient off-load and updates, each in its lane.

Source: `shardlab.engines.slide`; what runs in which lane and what waits for what is that of its
schedule, transfers and optimizer.
"""

from collections import deque
from collections.abc import Sequence

from shardlab.forecast.coding import NORM
from shardlab.forecast.costs import Costs
from shardlab.forecast.sliding_costs import Movements
from shardlab.forecast.work import COMPUTE, Step, Work
from shardlab.models.slide_buffers import slot_sizes, window_slots

IN, OUT, UPDATE = "in", "out", "update"
"""lanes"""
_LEAVING = 2
"""gradient vectors in flight (`shardlab.engines.scheduling`)"""


class Slide(Step):
    """Schedule of `slide` as tasks; the root is unit 0 and stays resident on the device."""

    def __init__(self, work: Work, costs: Costs) -> None:
        super().__init__(work, costs)
        self._moves = Movements(work, costs)
        self._units = range(1, len(work.units))
        self._stay = self._units[: window_slots(work.strategy, len(self._units))]
        """units resident at the start of forward: as many as the window holds"""
        self.gathered = {*self._stay}  # they were prefetched during the previous step
        self._leaving: deque[str] = deque()
        self._landed: dict[int, str] = {}
        self._updated: dict[int, str] = {}
        self._last_in: dict[int, int] = {}
        """unit whose gradients arrived last, by slot of host memory"""
        self._stale = False

    def add_step(self) -> None:  # noqa: D102
        count = self.work.accumulation
        for number in range(count):
            first, last = number == 0, number == count - 1
            self._pass_forward()
            self._pass_backward(first, last)
        self._end()

    def _pass_forward(self) -> None:
        self._bring_first()
        self.use("forward", 0, 0.0)
        for unit in self._units:
            self._start_all(self._units[unit - 1 :])
            self.use("forward", unit, self._forward * self._share[unit])
            if unit <= len(self._units) - len(self._stay):
                self.gathered.discard(unit)
                self._start_all(self._units[unit:])
        self.use("forward", 0, self._forward * self._share[0])

    def _pass_backward(self, first: bool, last: bool) -> None:
        self.use("backward", 0, self.backward_s(0))
        for unit in reversed(self._units):
            self._start_all(self._units[:unit][::-1])
            self.use("backward", unit, self.backward_s(unit))
            left = self._leave(unit)
            if last or unit not in self._stay:
                self.gathered.discard(unit)
            self._start_all(self._units[: unit - 1][::-1])
            self._land(unit, left, first, last)
        self._stale = last
        self._land(0, self._leave(0), first, last)

    def _end(self) -> None:
        """Add the gradient norm, of which every rank has a part, and what depends on it."""
        norm = self.costs.inside.all_reduce(1, NORM)
        self.compute("landed", 0.0, [self._landed[0]])
        self.launch("norm", COMPUTE, norm)
        if self.work.holding:
            for unit in (0, *self._units):
                self._update(unit)
        self._bring_first()
        self.compute("rest", max(self.work.compute.rest - self.work.update_s, 0.0))

    def _bring_first(self) -> None:
        self.gathered.intersection_update(self._stay)
        if self._stale:
            self._stale = False
            self._start(0)
        self._start_all(self._stay)

    def _start_all(self, units: Sequence[int]) -> None:
        """Prefetch as many units as the window has free slots."""
        for unit in units:
            if unit not in self.gathered:
                if len(self.gathered) == len(self._stay):
                    return
                self.gathered.add(unit)
                self._start(unit)

    def _start(self, unit: int) -> None:
        after = [self._updated[unit]] if unit in self._updated else []
        name = self.launch(f"bring {unit}", IN, self._moves.arrival(unit), after)
        assert name is not None
        self.arriving[unit] = name

    def use(self, what: str, unit: int, seconds: float) -> None:  # noqa: D102
        assert unit == 0 or unit in self.gathered, "a unit is used that has no memory"
        super().use(what, unit, seconds)

    def _leave(self, unit: int) -> str:
        if len(self._leaving) == _LEAVING:
            self.compute("settle", 0.0, [self._leaving.popleft()])
        self.add(f"collect {unit}", COMPUTE, self._moves.collection(unit))
        left = self.launch(f"leave {unit}", OUT, self._moves.departure(unit), self._turn(unit))
        assert left is not None
        return left

    def _land(self, unit: int, left: str, first: bool, last: bool) -> None:
        """Add what follows the copy of an off-loaded gradient."""
        self._leaving.append(left)
        landing = self.awaited(self._moves.landing(unit, first, last))
        self._landed[unit] = self.add(f"land {unit}", UPDATE, landing, [left])
        if last and not self.work.holding:
            self._update(unit)
            for stays in reversed(self._stay):
                if stays < unit:
                    break  # backward needs this unit first
                self._start_all([stays])

    def _turn(self, unit: int) -> list[str]:
        """Add the work on what a host memory slot holds before new gradients arrive in it."""
        slots = len(slot_sizes(0, self._units)) - 1
        alone = self._moves.keeping == "arrived" or unit == 0
        slot = unit if alone else 1 + unit % slots
        before, self._last_in[slot] = self._last_in.get(slot), unit
        if before is None:
            return []
        taken = self._moves.keeping == "sums"
        return [(self._landed if taken else self._updated)[before]]

    def _update(self, unit: int) -> None:
        self._updated[unit] = self.add(f"update {unit}", UPDATE, self._moves.update(unit))
