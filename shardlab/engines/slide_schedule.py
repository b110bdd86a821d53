"""Module of the `slide` engine, and the order of its prefetches, off-loads and updates."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch.profiler import record_function

from shardlab.comm.background import Running
from shardlab.comm.collective import Collective
from shardlab.comm.routes import Collectives
from shardlab.core.errors import UserError
from shardlab.engines.scheduling import ScheduledModule, UnitSchedule
from shardlab.engines.slide_groups import RankGroups
from shardlab.engines.slide_memory import SlideUnit
from shardlab.engines.slide_optimizer import HostOptimizer
from shardlab.engines.slide_transfers import GradOffload, Prefetcher
from shardlab.models.units import UnitPlan, owned_parameters


class SlideSchedule(UnitSchedule):
    """Order of one step, for units that are used one after another.

    forward   a unit is fetched while those before it compute, and freed after its use, for the next
              one; the last ones stay, as backward needs them first;
    backward  the same from the last unit to the first. Backward has passed a unit when it comes to
              one that was used before it: then it is freed, and its gradients are off-loaded, the
              last unit first on all ranks, whatever each of them has used. A parameter without a
              gradient then gets zeros;
    updates   begin when gradients are in host memory, unless they are held until all are;
    frozen    a unit that is frozen as a whole is never off-loaded.

    The root (what belongs to no unit) comes first, stays on the device and is off-loaded last; its
    frozen part is fetched once.

    Args:
        slots: the number of units that have memory on the device at a time.
        holding: the caller starts the updates.
    """

    def __init__(
        self,
        root: SlideUnit,
        units: Sequence[SlideUnit],
        slots: int,
        prefetcher: Prefetcher,
        offload: GradOffload,
        optimizer: HostOptimizer,
        holding: bool,
    ) -> None:
        self.root, self.units = root, units
        self.first = self.last = True
        """whether this is the first, the last micro-batch of a step"""
        self.in_step = False
        """the caller computes a micro-batch"""
        self.in_backward = False
        """gradients of this micro-batch may be there already"""
        self._slots, self._holding = slots, holding
        self._prefetcher, self._offload, self._optimizer = prefetcher, offload, optimizer
        self._pending: dict[str, Running] = {}
        """fetches that nobody has waited for, by the name of the unit"""
        self._awaited: set[SlideUnit] = set()
        """units that backward has yet to pass"""
        self._to_offload: deque[SlideUnit] = deque()
        """units whose gradients have not left in this backward pass"""
        self._uses: dict[SlideUnit, tuple[int, int]] = {}
        """the first and the last use of units in this forward pass, which are counted from 0"""
        self._use_count = 0
        self._step = 0
        self._accounted_step: int | None = 0
        """the step whose traffic fetches are; None for an evaluation, and for what it or a change
        of host memory makes necessary"""
        root.allocate()
        self._stale = root.on_device
        """the part of the root that is not on the device as it is in host memory"""
        self._recomputing = False
        """the forward pass of the model is over: what computes now does so for backward"""
        self._ended: Running | None = None
        """agreement of the ranks on the end of a backward pass"""

    def begin(self) -> None:
        """Prepare the forward pass of the model."""
        self.in_backward = self._recomputing = False
        self._awaited = {*self.units}
        self._to_offload = deque(unit for unit in reversed(self.units) if unit.count)
        self._uses.clear()
        self._use_count = 0
        self._fetch_first()
        # after the fetch: what is still missing now was lost to an evaluation, not to this pass
        self._accounted_step = self._step if torch.is_grad_enabled() else None
        self._wait(self.root)

    def wait(self) -> None:
        """Wait until all ranks have ended their backward pass after the same gathers."""
        if self._ended is not None:
            self._ended.wait()

    def end_step(self) -> None:
        """Fetch what the next forward pass begins with, after the last gradient of a step."""
        self._prefetcher.count_step(self._step)
        self._step += 1
        self._accounted_step = self._step
        self._fetch_first()

    def _fetch_first(self) -> None:
        first = self.units[: self._slots]
        for unit in self._on_device():
            if unit not in first:
                self._free(unit)
        if self._stale.numel():
            fetch = self._prefetcher.start(self.root, self._stale, self._accounted_step, False)
            self._pending[self.root.name] = fetch
            self._stale = self._stale[:0]
        self._fetch_all(first)

    def forget(self) -> None:
        """Invalidate all that is on the device: host memory has changed."""
        for name in [*self._pending]:
            # the host is about to write to what a fetch in progress reads
            self._pending.pop(name).wait_for_device()
        for unit in self._on_device():
            self._free(unit)
            self._accounted_step = None
        self._stale = self.root.on_device

    def computed(self) -> None:
        """Note the end of the model's forward pass."""
        self._recomputing = True

    def before_forward(self, index: int) -> None:  # noqa: D102
        unit = self.units[index]
        if self._recomputing:  # backward goes on with the units before, which it fetches itself
            self._need(unit, ())
            return
        first, _ = self._uses.get(unit, (self._use_count, 0))
        self._uses[unit] = first, self._use_count
        self._use_count += 1
        self._need(unit, self.units[index + 1 :])

    def after_forward(self, index: int) -> None:  # noqa: D102
        if self._recomputing or index >= len(self.units) - self._slots:
            return
        self._free(self.units[index])
        self._fetch_all(self.units[index + 1 :])

    def before_backward(self, index: int) -> None:  # noqa: D102
        self.in_backward = True
        unit = self.units[index]
        _, last = self._uses[unit]
        # autograd goes through operations in reverse: what was used after this unit is done, and
        # so is what was not used at all
        self._pass(u for u in reversed(self.units) if self._uses.get(u, (math.inf, 0))[0] > last)
        # an output that a unit only passes on may have its gradient later, when units before this
        # one are done, too
        if unit in self._awaited:
            self._need(unit, self._awaited_before(unit))

    def after_backward(self) -> None:
        """Off-load whatever gradients are there."""
        self._ended = self._prefetcher.end_backward()
        self._pass(reversed(self.units))
        if self.last:
            self._stale = self.root.on_device[: self.root.size]
        if self.root.count:
            self._start_offload(self.root)
        self.in_backward = False

    def _on_device(self) -> list[SlideUnit]:
        return [unit for unit in self.units if unit.allocated]

    def _need(self, unit: SlideUnit, then: Iterable[SlideUnit]) -> None:
        """Return when a unit is on the device; fetch others after it as far as there is space."""
        if not unit.allocated and len(held := self._on_device()) == self._slots:
            # the farthest is used last, whatever the direction
            self._free(max(held, key=lambda each: abs(each.index - unit.index)))
        self._fetch_all([unit, *then])
        self._wait(unit)

    def _fetch_all(self, units: Iterable[SlideUnit]) -> None:
        """Fetch units in order, until as many as fit are on the device."""
        space = self._slots - len(self._on_device())
        for unit in units:
            if not unit.allocated:
                if not space:
                    return
                space -= 1
                unit.allocate()
                self._pending[unit.name] = self._prefetcher.start(
                    unit, unit.on_device, self._accounted_step, self.in_backward
                )

    def _free(self, unit: SlideUnit) -> None:
        self._wait(unit)  # nothing may write to memory that others have by then
        unit.free()

    def _wait(self, unit: SlideUnit) -> None:
        pending = self._pending.pop(unit.name, None)
        if pending is not None:
            with record_function(f"shardlab::wait for {unit.name}"):
                pending.wait()

    def _pass(self, units: Iterable[SlideUnit]) -> None:
        """Free and off-load units that backward is done with, and fetch the next ones."""
        # all of them before any is freed: freeing one fetches units that are still awaited
        passed = [unit for unit in units if unit in self._awaited]
        self._awaited.difference_update(passed)
        for unit in passed:
            if unit.allocated:
                # what the next forward pass begins with stays, unless it is about to be updated
                if (self.last and unit.count) or unit not in self.units[: self._slots]:
                    self._free(unit)
                self._fetch_all(self._awaited_before(unit))
        # in the order that is the same on all ranks
        while self._to_offload and self._to_offload[0] not in self._awaited:
            self._start_offload(self._to_offload.popleft())

    def _awaited_before(self, unit: SlideUnit) -> list[SlideUnit]:
        """Return the units that backward needs next; those that are done may be updated."""
        return [u for u in reversed(self.units) if u.index < unit.index and u in self._awaited]

    def _start_offload(self, unit: SlideUnit) -> None:
        self._prefetcher.note_pass(unit, True)
        self._offload.start(unit, self.first, self.last)
        if self.last and not self._holding:
            self._optimizer.update(unit)


class SlideModule(ScheduledModule):
    """Wrapper of `model` whose units are on the device while they are used.

    `schedule` and `owner` are set after `attach`.

    Args:
        plans: its units, in the order of their use; what is left makes up the root.
        units: the root, then those of `plans`, unbound.
    """

    schedule: SlideSchedule
    owner: Callable[[], object]
    """the engine, as long as there is one"""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[UnitPlan],
        units: Sequence[SlideUnit],
        groups: RankGroups,
    ) -> None:
        super().__init__(model, plans)
        self._units = units
        self._groups = groups
        self.gather: Collective | None = None
        self.reduce: Collective | None = None
        self.average: Collective | None = None
        # hooks, not `forward`: others call the model, too, as its `generate` does
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self.schedule.computed())

    def attach_collectives(self, collectives: Collectives) -> None:  # noqa: D102
        gathers, reductions = self._groups.gathers, self._groups.reductions
        across = self._groups.across
        self.gather = None if gathers is None else collectives.weights(gathers)
        self.reduce = None if reductions is None else collectives.gradients(reductions)
        self.average = None if across is None else collectives.replicas(across)

    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the trained parameters of each unit."""
        return {unit.name: list(unit.shapes) for unit in self._units}

    def _begin(self) -> None:
        if self.owner() is None:
            raise UserError(
                "slide: what trained the model is gone, and its memory with it: keep SlideFSDP as "
                "long as the model is used, or load its state_dict() into a new one"
            )
        if torch.is_grad_enabled() and not self.schedule.in_step:
            raise UserError(
                "slide: the model was called outside of a step, where its gradients would be lost: "
                "call what trains it (SlideFSDP), or use torch.no_grad()"
            )
        self.schedule.begin()


def refuse_shared(model: nn.Module, plans: Sequence[UnitPlan]) -> None:
    """Refuse a unit that uses a parameter of another one, which is not on the device then."""
    root, *others = owned_parameters(model, plans)
    owners = {p: (name, unit) for unit, own in (root, *others) for name, p in own.items()}
    modules = [
        (unit, module)
        for (unit, _), plan in zip(others, plans, strict=True)
        for part in plan.modules
        for module in part.modules()
    ]
    inside = {module for _, module in modules}
    modules += [(root[0], module) for module in model.modules() if module not in inside]
    for user, module in modules:
        for parameter in module.parameters(recurse=False):
            name, owner = owners[parameter]
            if owner != user:
                raise UserError(
                    f"slide: {name} belongs to {owner}, which leaves the device, and {user} uses "
                    "it, too: give each a parameter of its own, or choose another engine"
                )
