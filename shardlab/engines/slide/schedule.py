"""The order of prefetches, off-loads and updates of one step."""

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.profiler import record_function

from shardlab.comm.background import Running
from shardlab.engines.scheduling import MissingGradients, UnitSchedule
from shardlab.engines.slide.grad_offload import GradOffload
from shardlab.engines.slide.optimizer import HostOptimizer
from shardlab.engines.slide.prefetch import Prefetcher, Window
from shardlab.engines.slide.unit import SlideUnit


class Schedule(UnitSchedule):
    """Order of one step, for units that are used one after another.

    forward   a unit is fetched while those before it compute, and gives its slot to the next one
              after its use; the last ones stay, as backward needs them first;
    backward  the same from the last unit to the first. When all gradients of a unit are there, its
              slot is free. They are off-loaded in parts as they are computed: the last unit first,
              on all ranks, whatever each of them has used. A parameter without a gradient when
              backward has passed its unit gets none;
    updates   begin when gradients are in host memory, unless they are held until all are;
    frozen    a unit with frozen parameters gives its slot back when backward has passed it, which
              may be after its last gradient. A unit that is frozen as a whole is never off-loaded.

    The root (what belongs to no unit) has memory of its own. It comes first, stays for the step and
    is off-loaded last; its frozen part is fetched once.

    Args:
        vector: that of the root on the device.
        holding: the caller starts the updates.
    """

    def __init__(
        self,
        root: SlideUnit,
        units: Sequence[SlideUnit],
        vector: Tensor,
        window: Window,
        prefetcher: Prefetcher,
        offload: GradOffload,
        optimizer: HostOptimizer,
        holding: bool,
    ) -> None:
        self.root, self.units, self.window = root, units, window
        self.first = self.last = True
        """whether this is the first, the last micro-batch of a step"""
        self.in_step = False
        """the caller computes a micro-batch"""
        self.in_backward = False
        """gradients of this micro-batch may be there already"""
        self._vector, self._holding = vector, holding
        self._prefetcher, self._offload, self._optimizer = prefetcher, offload, optimizer
        self._pending: dict[str, Running] = {}
        """fetches that nobody has waited for, by the name of the unit"""
        self._missing = MissingGradients()
        self._to_offload: deque[SlideUnit] = deque()
        """units whose gradients have not left in this backward pass"""
        self._uses: dict[int, tuple[int, int]] = {}
        """the first and the last use of units in this forward pass, which are counted from 0"""
        self._use_count = 0
        self._step = 0
        self._accounted_step: int | None = 0
        """the step whose traffic fetches are; None for an evaluation, and for what it or a change
        of host memory makes necessary"""
        self._stale = vector
        """the part of the root that is not on the device as it is in host memory"""
        self._to_pass: set[int] = set()
        """indices of units with frozen parameters that backward has yet to pass"""
        self._recomputing = False
        """the forward pass of the model is over: what computes now does so for backward"""

    def begin(self) -> None:
        """Prepare the forward pass of the model."""
        self.in_backward = False
        self._missing.expect(self.units)
        self._to_offload = deque(unit for unit in reversed(self.units) if unit.count)
        self._uses.clear()
        self._to_pass.clear()
        self._recomputing = False
        self._use_count = 0
        self._fetch_first()
        # after the fetch: what is still missing now was lost to an evaluation, not to this pass
        self._accounted_step = self._step if torch.is_grad_enabled() else None
        self._wait(self.root)

    def end_step(self) -> None:
        """Fetch what the next forward pass begins with, after the last gradient of a step."""
        self._prefetcher.count_step(self._step)
        self._step += 1
        self._accounted_step = self._step
        self._fetch_first()

    def _fetch_first(self) -> None:
        first = self.units[: self.window.slots]
        for unit in self.window.alive():
            if unit not in first:
                self._release(unit)
        if self._stale.numel():
            fetch = self._prefetcher.start(self.root, self._stale, self._accounted_step)
            self._pending[self.root.name] = fetch
            self._stale = self._vector[:0]
            self.root.bind(self._vector)
        self._fetch_all(first)

    def forget(self) -> None:
        """Invalidate all that is on the device: host memory has changed."""
        for name in [*self._pending]:
            # the host is about to write to what a fetch in progress reads
            self._pending.pop(name).synchronize()
        for unit in self.window.alive():
            self._release(unit)
            self._accounted_step = None
        self._stale = self._vector

    def computed(self) -> None:
        """Note the end of the model's forward pass."""
        self._recomputing = True

    def before_forward(self, index: int) -> None:  # noqa: D102
        if self._recomputing:  # backward goes on with the units before, which it fetches itself
            self._need(index, ())
            return
        first, _ = self._uses.get(index, (self._use_count, 0))
        self._uses[index] = first, self._use_count
        self._use_count += 1
        self._need(index, self.units[index + 1 :])

    def after_forward(self, index: int) -> None:  # noqa: D102
        if self._recomputing or index >= len(self.units) - self.window.slots:
            return
        self._release(self.units[index])
        self._fetch_all(self.units[index + 1 :])

    def returned(self, index: int) -> None:
        """Note that backward will pass a unit with frozen parameters: its output has a gradient."""
        self._to_pass.add(self.units[index].index)

    def before_backward(self, index: int) -> None:  # noqa: D102
        self.in_backward = True
        self._finish_behind(index)
        # an output that a unit only passes on may have its gradient later, when units before this
        # one are done, too
        if self._awaited(self.units[index]):
            self._need(index, self._awaited_before(index))

    def accumulated(self, unit: SlideUnit) -> None:  # noqa: D102
        self.in_backward = True
        if unit is self.root:
            return
        if self._missing.arrived(unit):
            if unit.index not in self._to_pass:
                self._free(unit)
            self._offload_ready()
        elif unit is self._to_offload[0]:
            self._offload.advance(unit)

    def finish(self) -> None:
        """Off-load whatever gradients are there, after backward."""
        self._prefetcher.backward_ended()
        self._give_up(reversed(self.units))
        self._offload_ready()
        if self.last:
            self._stale = self._vector[: self.root.size]
        if self.root.count:
            self._start_offload(self.root)
        self.in_backward = False

    def _need(self, index: int, then: Iterable[SlideUnit]) -> None:
        """Return when a unit is on the device; fetch others after it as far as slots are free."""
        unit = self.units[index]
        if unit not in self.window:
            while not self.window.has_room(unit):
                held = self.window.alive()
                # the farthest is used last, whatever the direction
                self._release(max(held, key=lambda each: abs(each.index - unit.index)))
            self._fetch(unit)
        self._fetch_all(then)
        self._wait(unit)

    def _fetch_all(self, units: Iterable[SlideUnit], next_step: bool = False) -> None:
        """Fetch units in order, until no slot is free."""
        for unit in units:
            if unit not in self.window:
                if not self.window.has_room(unit):
                    return
                self._fetch(unit, next_step)

    def _fetch(self, unit: SlideUnit, next_step: bool = False) -> None:
        vector = self.window.admit(unit)
        step = self._step + 1 if next_step else self._accounted_step
        self._pending[unit.name] = self._prefetcher.start(unit, vector, step)

    def _release(self, unit: SlideUnit) -> None:
        self._pending.pop(unit.name, None)
        self.window.release(unit)

    def _wait(self, unit: SlideUnit) -> None:
        pending = self._pending.pop(unit.name, None)
        if pending is not None:
            with record_function(f"shardlab::wait for {unit.name}"):
                pending.wait()

    def _finish_behind(self, index: int) -> None:
        """Finish the units that backward has passed: those first used after this one's last use."""
        _, last = self._uses[index]
        behind = [
            unit
            for unit in reversed(self.units)
            if self._uses.get(unit.index - 1, (math.inf, 0))[0] > last  # or not used at all
        ]
        self._give_up(behind)
        self._offload_ready()

    def _give_up(self, units: Iterable[SlideUnit]) -> None:
        """Expect no more gradients of units that backward is done with."""
        # all of them before any is freed: freeing one fetches units that are still awaited
        given_up = [unit for unit in units if self._awaited(unit)]
        for unit in given_up:
            self._missing.give_up(unit)
            self._to_pass.discard(unit.index)
        for unit in given_up:
            self._free(unit)

    def _awaited(self, unit: SlideUnit) -> bool:
        """Return whether backward is not done with a unit."""
        return self._missing.of(unit) or unit.index in self._to_pass

    def _awaited_before(self, index: int) -> list[SlideUnit]:
        """Return the units that backward needs next; those that are done may be updated."""
        return [unit for unit in reversed(self.units[:index]) if self._awaited(unit)]

    def _free(self, unit: SlideUnit) -> None:
        """Free the slot of a unit that this backward pass uses no more, and fetch the next ones."""
        if unit in self.window:
            changes = self.last and unit.count
            # what the next forward pass begins with stays, unless it is about to be updated
            if changes or unit not in self.units[: self.window.slots]:
                self._release(unit)
            self._fetch_all(self._awaited_before(unit.index - 1))

    def _offload_ready(self) -> None:
        """Off-load complete units, in the order that is the same on all ranks."""
        while self._to_offload and not self._missing.of(self._to_offload[0]):
            self._start_offload(self._to_offload.popleft())
        if self.last and not self._holding:
            self._fetch_for_next_step()

    def _start_offload(self, unit: SlideUnit) -> None:
        self._offload.start(unit, self.first, self.last)
        if self.last and not self._holding:
            self._optimizer.update(unit)

    def _fetch_for_next_step(self) -> None:
        """Fetch what the next forward pass begins with to slots that backward needs no more.

        In the order of updates, which is the same on all ranks: these fetches wait for them.
        """
        for unit in reversed(self.units[: self.window.slots]):
            if unit in self._to_offload or self._awaited(unit):
                return
            self._fetch_all([unit], next_step=True)
