"""When units come to the device, and when their gradients leave it."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.profiler import record_function

from shardlab.comm.background import Running
from shardlab.engines.slide.arrivals import Arrivals
from shardlab.engines.slide.departures import Departures
from shardlab.engines.slide.unit import SlidUnit
from shardlab.engines.slide.updates import Updates
from shardlab.engines.slide.window import Window
from shardlab.engines.watch import MissingGradients, Uses


class Schedule(Uses):
    """The order of one step, for units that are used one after another.

    forward   a unit is on its way while those before it compute, and gives its slot to the next
              one after its use; the last ones stay, as backward needs them first;
    backward  the same from the last unit to the first. When all gradients of a unit are there, its
              slot is free and they leave: the last unit first, on all ranks, whatever each of them
              has used. What has no gradient when backward has passed it gets none;
    updates   begin when gradients have landed, unless they are held back until all have.

    The root (what belongs to no unit) has memory of its own. It comes first, stays for the step and
    leaves last.

    Args:
        vector: that of the root on the device.
        holding: the caller starts the updates.
    """

    def __init__(
        self,
        root: SlidUnit,
        units: Sequence[SlidUnit],
        vector: Tensor,
        window: Window,
        arrivals: Arrivals,
        departures: Departures,
        updates: Updates,
        holding: bool,
    ) -> None:
        self.root, self.units, self.window = root, units, window
        self.first = self.last = True
        """whether this is the first, the last micro-batch of a step"""
        self._vector, self._holding = vector, holding
        self._arrivals, self._departures, self._updates = arrivals, departures, updates
        self._pending: dict[str, Running] = {}
        self._missing = MissingGradients()
        self._to_leave: deque[SlidUnit] = deque()
        """units whose gradients have not left in this backward pass"""
        self._uses: dict[int, tuple[int, int]] = {}
        """the first and the last use of units in this forward pass, which are counted from 0"""
        self._counted = 0
        self._step = 0
        self._stale = True
        """the root is not on the device as it is in main memory"""
        self.in_step = False
        """the caller computes a micro-batch"""
        self.in_backward = False
        """gradients of this micro-batch may be there already"""

    def begin(self) -> None:
        """Before the forward pass of the model."""
        self.in_backward = False
        self._missing.expect(self.units)
        self._to_leave = deque(reversed(self.units))
        self._uses.clear()
        self._counted = 0
        self._bring_first()
        self._wait(self.root)

    def end_step(self) -> None:
        """After the last gradient of a step: brings what the next forward pass begins with."""
        self._arrivals.counted(self._step)
        self._step += 1
        self._bring_first()

    def _bring_first(self) -> None:
        first = self.units[: self.window.slots]
        for unit in self.window.alive():
            if unit not in first:
                self._release(unit)
        if self._stale:
            self._stale = False
            arriving = self._arrivals.start(self.root, self._vector, self._step)
            self._pending[self.root.name] = arriving
            self.root.show(self._vector)
        self._start_all(first)

    def forget(self) -> None:
        """Main memory has changed: nothing that is on the device counts any more."""
        self._settle()
        for unit in self.window.alive():
            self._release(unit)
        self._stale = True

    def before_forward(self, index: int) -> None:  # noqa: D102
        if self.in_backward:  # what computes again is followed by the units before it
            self._need(index, ())
            return
        first, _ = self._uses.get(index, (self._counted, 0))
        self._uses[index] = first, self._counted
        self._counted += 1
        self._need(index, self.units[index + 1 :])

    def after_forward(self, index: int) -> None:  # noqa: D102
        if self.in_backward or index >= len(self.units) - self.window.slots:
            return
        self._release(self.units[index])
        self._start_all(self.units[index + 1 :])

    def before_backward(self, index: int) -> None:  # noqa: D102
        self.in_backward = True
        self._pass(index)
        self._need(index, self.units[:index][::-1])

    def accumulated(self, unit: SlidUnit) -> None:
        """One more parameter of a unit has its gradient."""
        self.in_backward = True
        if unit is not self.root and self._missing.arrived(unit):
            self._free(unit)
            self._leave()

    def finish(self) -> None:
        """After backward: whatever gradients are there have left."""
        self._give_up(self._to_leave)
        self._leave()
        self._stale = self.last
        self._start_leaving(self.root)
        self.in_backward = False

    def _need(self, index: int, then: Iterable[SlidUnit]) -> None:
        unit = self.units[index]
        if unit not in self.window:
            while not self.window.has_room:
                held = self.window.alive()
                self._release(max(held, key=lambda each: abs(each.index - unit.index)))
            self._start(unit)
        self._start_all(then)
        self._wait(unit)

    def _start_all(self, units: Iterable[SlidUnit], step: int | None = None) -> None:
        """As many of the next ones as there is room for."""
        for unit in units:
            if unit not in self.window:
                if not self.window.has_room:
                    return
                self._start(unit, step)

    def _start(self, unit: SlidUnit, step: int | None = None) -> None:
        """Brings a unit for a step, by default this one."""
        vector, step = self.window.admit(unit), self._step if step is None else step
        self._pending[unit.name] = self._arrivals.start(unit, vector, step)

    def _release(self, unit: SlidUnit) -> None:
        self._pending.pop(unit.name, None)
        self.window.release(unit)

    def _wait(self, unit: SlidUnit) -> None:
        pending = self._pending.pop(unit.name, None)
        if pending is not None:
            with record_function(f"shardlab::wait for {unit.name}"):
                pending.wait()

    def _settle(self) -> None:
        """Waits for all that is on its way to the device."""
        for name in [*self._pending]:
            self._pending.pop(name).wait()

    def _pass(self, index: int) -> None:
        """Backward has come to a unit: units that were first used after its last use are behind."""
        _, last = self._uses[index]
        behind = [
            unit
            for unit in self._to_leave
            if self._uses.get(unit.index - 1, (math.inf, 0))[0] > last  # or not used at all
        ]
        self._give_up(behind)
        self._leave()

    def _give_up(self, units: Iterable[SlidUnit]) -> None:
        """What has no gradient, the model did not use."""
        # all of them, before any is freed: none of them is needed again
        for unit in [unit for unit in units if self._missing.give_up(unit)]:
            self._free(unit)

    def _free(self, unit: SlidUnit) -> None:
        """A unit is not used any more in this backward pass."""
        if unit in self.window:
            if self.last or unit not in self.units[: self.window.slots]:
                self._release(unit)
            before = self.units[: unit.index - 1][::-1]
            self._start_all(each for each in before if self._missing.of(each))

    def _leave(self) -> None:
        """The gradients of units whose turn it is."""
        while self._to_leave and not self._missing.of(self._to_leave[0]):
            self._start_leaving(self._to_leave.popleft())

    def _start_leaving(self, unit: SlidUnit) -> None:
        self._departures.start(unit, self.first, self.last)
        if self.last and not self._holding:
            self._updates.start(unit)
            self._bring_again()

    def _bring_again(self) -> None:
        """Slots that backward needs no more wait for what the next forward pass begins with.

        Units come in the order of their updates, which is the same on all ranks.
        """
        for unit in reversed(self.units[: self.window.slots]):
            if unit in self._to_leave:
                return
            self._start_all([unit], self._step + 1)
