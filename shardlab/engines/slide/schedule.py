"""When units come to the device, and when their gradients leave it."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from shardlab.engines.common.watch import MissingGradients, Uses
from shardlab.engines.slide.arrivals import Arrivals
from shardlab.engines.slide.departures import Departures
from shardlab.engines.slide.unit import SlidUnit
from shardlab.engines.slide.updates import Updates
from shardlab.engines.slide.window import Window
from shardlab.transport.background import Running


class Schedule(Uses):
    """The order of one step, for units that are used one after another.

    forward   a unit is on its way while those before it compute, and gives its slot to the next
              one after its use; the last ones stay, as backward needs them first;
    backward  the same from the last unit to the first. When all gradients of a unit are there, its
              slot is free. They leave in parts as they come: the last unit first, on all ranks,
              whatever each of them has used. What has no gradient when backward has passed it gets
              none;
    updates   begin when gradients have landed, unless they are held back until all have.

    frozen    what has frozen parameters gives its slot back when backward has passed it, which may
              be after its last gradient. What is frozen as a whole never leaves.

    The root (what belongs to no unit) has memory of its own. It comes first, stays for the step and
    leaves last; its frozen part comes once.

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
        self._served: int | None = 0
        """the step that units come for; None for an evaluation, and for what comes again after it
        or as host memory has changed"""
        self._stale = vector
        """the part of the root that is not on the device as it is in host memory"""
        self._ahead: set[int] = set()
        """units with frozen parameters that backward has yet to pass, by their index"""
        self._again = False
        """the forward pass of the model is over: what computes now does so for backward"""
        self.in_step = False
        """the caller computes a micro-batch"""
        self.in_backward = False
        """gradients of this micro-batch may be there already"""

    def begin(self) -> None:
        """Before the forward pass of the model."""
        self.in_backward = False
        self._missing.expect(self.units)
        self._to_leave = deque(unit for unit in reversed(self.units) if unit.count)
        self._uses.clear()
        self._ahead.clear()
        self._again = False
        self._counted = 0
        self._bring_first()
        self._served = self._step if torch.is_grad_enabled() else None
        self._wait(self.root)

    def end_step(self) -> None:
        """After the last gradient of a step: brings what the next forward pass begins with."""
        self._arrivals.counted(self._step)
        self._step += 1
        self._served = self._step
        self._bring_first()

    def _bring_first(self) -> None:
        first = self.units[: self.window.slots]
        for unit in self.window.alive():
            if unit not in first:
                self._release(unit)
        if self._stale.numel():
            arriving = self._arrivals.start(self.root, self._stale, self._served)
            self._pending[self.root.name] = arriving
            self._stale = self._vector[:0]
            self.root.show(self._vector)
        self._start_all(first)

    def forget(self) -> None:
        """Host memory has changed: nothing that is on the device counts any more."""
        self._settle()
        for unit in self.window.alive():
            self._release(unit)
            self._served = None
        self._stale = self._vector

    def computed(self) -> None:
        """After the forward pass of the model."""
        self._again = True

    def before_forward(self, index: int) -> None:  # noqa: D102
        if self._again:  # what computes again is followed by the units before it
            self._need(index, ())
            return
        first, _ = self._uses.get(index, (self._counted, 0))
        self._uses[index] = first, self._counted
        self._counted += 1
        self._need(index, self.units[index + 1 :])

    def after_forward(self, index: int) -> None:  # noqa: D102
        if self._again or index >= len(self.units) - self.window.slots:
            return
        self._release(self.units[index])
        self._start_all(self.units[index + 1 :])

    def returned(self, index: int) -> None:
        """What a unit with frozen parameters returned has a gradient: backward will pass it."""
        self._ahead.add(self.units[index].index)

    def before_backward(self, index: int) -> None:  # noqa: D102
        self.in_backward = True
        self._pass(index)
        # what a unit only passes on has its gradient later, when those before it may be done, too
        if self._awaits(self.units[index]):
            self._need(index, self._awaited_before(index))

    def accumulated(self, unit: SlidUnit) -> None:
        """One more parameter of a unit has its gradient."""
        self.in_backward = True
        if unit is self.root:
            return
        if self._missing.arrived(unit):
            if unit.index not in self._ahead:
                self._free(unit)
            self._leave()
        elif unit is self._to_leave[0]:
            self._departures.advance(unit)

    def finish(self) -> None:
        """After backward: whatever gradients are there have left."""
        self._arrivals.ended()
        self._give_up(reversed(self.units))
        self._leave()
        if self.last:
            self._stale = self._vector[: self.root.size]
        if self.root.count:
            self._start_leaving(self.root)
        self.in_backward = False

    def _need(self, index: int, then: Iterable[SlidUnit]) -> None:
        unit = self.units[index]
        if unit not in self.window:
            while not self.window.has_room(unit):
                held = self.window.alive()
                self._release(max(held, key=lambda each: abs(each.index - unit.index)))
            self._start(unit)
        self._start_all(then)
        self._wait(unit)

    def _start_all(self, units: Iterable[SlidUnit], ahead: bool = False) -> None:
        """As many of the next ones as there is room for."""
        for unit in units:
            if unit not in self.window:
                if not self.window.has_room(unit):
                    return
                self._start(unit, ahead)

    def _start(self, unit: SlidUnit, ahead: bool = False) -> None:
        """Brings a unit; ahead for the next step."""
        vector, step = self.window.admit(unit), self._step + 1 if ahead else self._served
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
            for unit in reversed(self.units)
            if self._uses.get(unit.index - 1, (math.inf, 0))[0] > last  # or not used at all
        ]
        self._give_up(behind)
        self._leave()

    def _give_up(self, units: Iterable[SlidUnit]) -> None:
        """Backward is done with units; what has no gradient then, the model did not use."""
        # all of them, before any is freed: none of them is needed again
        given_up = [unit for unit in units if self._awaits(unit)]
        for unit in given_up:
            self._missing.give_up(unit)
            self._ahead.discard(unit.index)
        for unit in given_up:
            self._free(unit)

    def _awaits(self, unit: SlidUnit) -> bool:
        """Whether backward has not done with a unit."""
        return self._missing.of(unit) or unit.index in self._ahead

    def _awaited_before(self, index: int) -> list[SlidUnit]:
        """The units that backward comes to next; those that are done may leave and be updated."""
        return [unit for unit in reversed(self.units[:index]) if self._awaits(unit)]

    def _free(self, unit: SlidUnit) -> None:
        """A unit is not used any more in this backward pass."""
        if unit in self.window:
            changes = self.last and unit.count
            if changes or unit not in self.units[: self.window.slots]:
                self._release(unit)
            self._start_all(self._awaited_before(unit.index - 1))

    def _leave(self) -> None:
        """The gradients of units whose turn it is."""
        while self._to_leave and not self._missing.of(self._to_leave[0]):
            self._start_leaving(self._to_leave.popleft())
        if self.last and not self._holding:
            self._bring_again()

    def _start_leaving(self, unit: SlidUnit) -> None:
        self._departures.start(unit, self.first, self.last)
        if self.last and not self._holding:
            self._updates.start(unit)

    def _bring_again(self) -> None:
        """Slots that backward needs no more wait for what the next forward pass begins with.

        Units come in the order of their updates, which is the same on all ranks.
        """
        for unit in reversed(self.units[: self.window.slots]):
            if unit in self._to_leave or self._awaits(unit):
                return
            self._start_all([unit], ahead=True)
