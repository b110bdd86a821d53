"""Predicted step of `slide`: copies in and out and updates have a lane each.

Source: `shardlab.engines.slide`. With P parameters, N units of G elements of which K stay in the
window, W ranks of a node, b bytes of a parameter on the device and l of a gradient, a rank copies
b (P + (N - K) G) in and l P out, a W-th of either where ranks gather or reduce on the device. An
update moves 28 bytes per element in float32 (parameter and two moments read and written, gradient
read). Gradients are clipped: updates wait for the norm and overlap with the next forward pass.
"""

from collections.abc import Sequence

from shardlab.config.settings import DTYPE_BYTES
from shardlab.forecast.coding import NORM
from shardlab.forecast.costs import Costs, Phase, Phases
from shardlab.forecast.step import COMPUTE, Step, Work
from shardlab.models.memory import gradient_bytes, gradient_vectors, window_slots

_IN, _OUT, _UPDATE = "in", "out", "update"
"""lanes"""
_FLOAT = DTYPE_BYTES["fp32"]


class Streamed(Step):
    """Units that slide through a window; the root is unit 0 and stays on the device in a step."""

    repeated = 3  # updates of a step overlap with the next

    def __init__(self, work: Work, costs: Costs) -> None:
        super().__init__(work, costs)
        strategy = work.strategy
        self._inside, self._across = costs.inside, costs.across
        self._ranks = self._inside.world_size
        self._units = range(1, len(work.units))
        self._stay = self._units[: window_slots(strategy, len(self._units))]
        """units on the device at the start of forward: as many as the window holds"""
        self.gathered = {*self._stay}
        self._leaving: list[float] = []
        self._updated: dict[int, float] = {}
        self._copied = work.weights.element_bytes
        self._returned = gradient_bytes(strategy, self._copied, self._ranks)
        self._vectors = gradient_vectors(strategy, self._ranks)
        self._reduces = strategy.grad_sync == "gpu_reduce" and self._ranks > 1

    def walk(self) -> None:  # noqa: D102
        for left in reversed(range(self.work.accumulation)):
            self._forward()
            self._backward(last=left == 0)
        # every rank has a part of the norm
        self.compute(0.0, max(self._leaving))
        self.launch(COMPUTE, self._inside.all_reduce(1, NORM))
        self._leaving.clear()
        for unit in (0, *self._units):
            now = self.compute(0.0)
            self._updated[unit] = self.timeline.run(_UPDATE, self._update(unit), now)
        self.gathered.intersection_update(self._stay)
        self._bring(0)
        self._bring_all(self._stay)
        self.compute(max(self.work.compute.rest - self.work.update_s, 0.0))

    def _forward(self) -> None:
        self._bring_all(self._stay)
        self.use(0, 0.0)
        for unit in self._units:
            self._bring_all(self._units[unit - 1 :])
            self.use(unit, self.forward_s * self.share[unit])
            if unit <= len(self._units) - len(self._stay):
                self.gathered.discard(unit)
        self.use(0, self.forward_s * self.share[0])

    def _backward(self, last: bool) -> None:
        self.use(0, self.backward_s(0))
        for unit in reversed(self._units):
            self._bring_all(self._units[:unit][::-1])
            self.use(unit, self.backward_s(unit))
            if last or unit not in self._stay:
                self.gathered.discard(unit)
            self._leave(unit, last)
        self._leave(0, last)

    def _bring_all(self, units: Sequence[int]) -> None:
        """Copy in as many units as the window has free slots."""
        for unit in units:
            if unit not in self.gathered:
                if len(self.gathered) == len(self._stay):
                    return
                self.gathered.add(unit)
                self._bring(unit)

    def _bring(self, unit: int) -> None:
        elements = self.work.units[unit]
        if self.work.strategy.param_transfer == "full" or self._ranks == 1:
            phases: Phases = (self.costs.move("copy", elements * self._copied),)
        else:
            own = self.costs.move("copy", elements * self._copied / self._ranks)
            phases = own, *self._inside.gather(elements, self.work.weights)
        self.arrival[unit] = self.launch(_IN, phases, self._updated.pop(unit, 0.0))

    def _leave(self, unit: int, last: bool) -> None:
        """Copy gradients out, then sum them over ranks and micro-batches."""
        elements = self.work.units[unit]
        if len(self._leaving) >= 2:  # vectors on the device that gradients leave from
            self.compute(0.0, self._leaving[-2])
        if self._reduces:
            phases: Phases = (
                *self._inside.reduce_scatter(elements, self.work.gradients[unit].inside),
                self.costs.move("copy", elements * self._returned / self._ranks),
            )
        else:
            phases = (self.costs.move("copy", elements * self._returned),)
        left = self.launch(_OUT, phases)
        summed = self.awaited(self._sum(unit, last))
        self._leaving.append(self.timeline.run(_UPDATE, summed, left))

    def _sum(self, unit: int, last: bool) -> Phases:
        elements, chunk = self.work.units[unit], self.work.units[unit] / self._ranks
        levels, phases = self.work.gradients[unit], list[Phase]()
        if self.work.accumulation > 1:  # read, and added to float32
            phases.append(self._move(elements / self._vectors * (self._returned + 2 * _FLOAT)))
        if not last:
            return tuple(phases)
        if not (levels.inside.native or self._reduces):  # messages, not sums in shared memory
            phases += self._inside.reduce_scatter(elements, levels.inside)
        average = levels.inside._replace(element_bytes=_FLOAT)
        phases += self._across.all_reduce(round(chunk), average)
        return (*phases, self._move(chunk * self._vectors * self._returned))  # the norm

    def _update(self, unit: int) -> Phases:
        """Return the update of this rank's part, which sums the vectors of all ranks."""
        states = 2 * (_FLOAT + 2 * DTYPE_BYTES[self.work.strategy.moment_dtype])
        narrow = 0 if self._copied == _FLOAT else self._copied
        gradients = self._vectors * self._returned
        chunk = self.work.units[unit] / self._ranks
        return (self._move(chunk * (states + gradients + narrow)),)

    def _move(self, nbytes: float) -> Phase:
        return self.costs.move("update", nbytes)
