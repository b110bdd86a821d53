"""When units come to the device, and when their gradients leave it."""

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
    backward  the same from the last unit to the first. When all gradients of a unit are there, they
              leave, and its slot is free; at the latest when backward has come to the unit before,
              so that they leave in one order on all ranks, whatever parameters each has used;
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
        self._stale = True
        """the root is not on the device as it is in main memory"""
        self._backward = False

    def begin(self) -> None:
        """Before the forward pass of the model."""
        self._backward = False
        self._missing.expect(self.units)
        self.prefetch()
        self._wait(self.root)

    def prefetch(self) -> None:
        """Brings what the next forward pass begins with."""
        first = self.units[: self.window.slots]
        for unit in self.window.alive():
            if unit not in first:
                self._release(unit)
        if self._stale:
            self._stale = False
            self._pending[self.root.name] = self._arrivals.start(self.root, self._vector)
            self.root.show(self._vector)
        self._start_all(first)

    def forget(self) -> None:
        """Main memory has changed: nothing that is on the device counts any more."""
        self._settle()
        for unit in self.window.alive():
            self._release(unit)
        self._stale = True

    def before_forward(self, index: int) -> None:  # noqa: D102
        # what computes again is followed by the units before it
        self._need(index, () if self._backward else self.units[index + 1 :])

    def after_forward(self, index: int) -> None:  # noqa: D102
        if self._backward or index >= len(self.units) - self.window.slots:
            return
        self._release(self.units[index])
        self._start_all(self.units[index + 1 :])

    def before_backward(self, index: int) -> None:  # noqa: D102
        self._backward = True
        self._complete_those(self.units[index + 1 :])
        self._need(index, self.units[:index][::-1])

    def accumulated(self, unit: SlidUnit) -> None:
        """One more parameter of a unit has its gradient."""
        if unit is not self.root and self._missing.arrived(unit):
            self._complete(unit)

    def finish(self) -> None:
        """After backward: whatever gradients are there have left."""
        self._complete_those(self.units)
        self._complete(self.root)

    def _need(self, index: int, then: Iterable[SlidUnit]) -> None:
        unit = self.units[index]
        if unit not in self.window:
            while not self.window.has_room:
                held = self.window.alive()
                self._release(max(held, key=lambda each: abs(each.index - unit.index)))
            self._start(unit)
        self._start_all(then)
        self._wait(unit)

    def _start_all(self, units: Iterable[SlidUnit]) -> None:
        """As many of the next ones as there is room for."""
        for unit in units:
            if unit not in self.window:
                if not self.window.has_room:
                    return
                self._start(unit)

    def _start(self, unit: SlidUnit) -> None:
        self._pending[unit.name] = self._arrivals.start(unit, self.window.admit(unit))

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

    def _complete_those(self, units: Sequence[SlidUnit]) -> None:
        """Their backward is over: what has no gradient, the model did not use."""
        for unit in reversed(units):
            if self._missing.give_up(unit):
                self._complete(unit)

    def _complete(self, unit: SlidUnit) -> None:
        """All gradients of a unit are there."""
        self._free(unit)
        self._departures.start(unit, self.first, self.last)
        if self.last and not self._holding:
            self._updates.start(unit)

    def _free(self, unit: SlidUnit) -> None:
        """A unit is not used any more in this backward pass."""
        if unit is self.root:
            self._stale = self.last
        elif unit in self.window:
            if self.last or unit not in self.units[: self.window.slots]:
                self._release(unit)
            self._start_all(self.units[: unit.index - 1][::-1])
