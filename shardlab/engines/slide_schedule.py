"""Module of the `slide` engine, and the order of its prefetches, off-loads and updates."""

import math
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils import checkpoint

from shardlab.comm.background import Running
from shardlab.comm.collective import Collective, MakeCollective
from shardlab.core.errors import UserError
from shardlab.engines.scheduling import ScheduledModule, UnitSchedule, with_gradient
from shardlab.engines.slide_groups import RankGroups
from shardlab.engines.slide_memory import SlideUnit
from shardlab.engines.slide_optimizer import HostOptimizer
from shardlab.engines.slide_transfers import GradOffload, Prefetcher, Window
from shardlab.models.units import UnitPlan, owned_parameters

P = ParamSpec("P")
Result = TypeVar("Result")


class Schedule(UnitSchedule):
    """Order of one step, for units that are used one after another.

    forward   a unit is fetched while those before it compute, and gives its slot to the next one
              after its use; the last ones stay, as backward needs them first;
    backward  the same from the last unit to the first. Backward has passed a unit when it comes to
              one that was used before it: then its slot is free, and its gradients are off-loaded,
              the last unit first on all ranks, whatever each of them has used. A parameter without
              a gradient then gets zeros;
    updates   begin when gradients are in host memory, unless they are held until all are;
    frozen    a unit that is frozen as a whole is never off-loaded.

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
        self._awaited: set[int] = set()
        """indices of units that backward has yet to pass"""
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
        self._recomputing = False
        """the forward pass of the model is over: what computes now does so for backward"""
        self._ended: Running | None = None
        """agreement of the ranks on the end of a backward pass"""

    def begin(self) -> None:
        """Prepare the forward pass of the model."""
        self.in_backward = False
        self._to_offload = deque(unit for unit in reversed(self.units) if unit.count)
        self._awaited = {unit.index for unit in self._to_offload}
        self._uses.clear()
        self._recomputing = False
        self._use_count = 0
        self._fetch_first()
        # after the fetch: what is still missing now was lost to an evaluation, not to this pass
        self._accounted_step = self._step if torch.is_grad_enabled() else None
        self._wait(self.root)

    def agree(self) -> None:
        """Return when all ranks have ended their backward pass after the same gathers."""
        if self._ended is not None:
            self._ended.wait()

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
        """Note that backward will pass a unit: its output has a gradient."""
        self._awaited.add(self.units[index].index)

    def before_backward(self, index: int) -> None:  # noqa: D102
        self.in_backward = True
        _, last = self._uses[index]
        # autograd goes through operations in reverse: what was used after this unit is done, and
        # so is what was not used at all
        uses = {unit.index: self._uses.get(unit.index - 1, (math.inf, 0)) for unit in self.units}
        self._pass(unit for unit in reversed(self.units) if uses[unit.index][0] > last)
        # an output that a unit only passes on may have its gradient later, when units before this
        # one are done, too
        if self.units[index].index in self._awaited:
            self._need(index, self._awaited_before(index))

    def finish(self) -> None:
        """Off-load whatever gradients are there, after backward."""
        self._ended = self._prefetcher.end_backward()
        self._pass(reversed(self.units))
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

    def _pass(self, units: Iterable[SlideUnit]) -> None:
        """Free and off-load units that backward is done with."""
        # all of them before any is freed: freeing one fetches units that are still awaited
        passed = [unit for unit in units if unit.index in self._awaited]
        self._awaited.difference_update(unit.index for unit in passed)
        for unit in passed:
            self._free(unit)
        # in the order that is the same on all ranks
        while self._to_offload and self._to_offload[0].index not in self._awaited:
            self._start_offload(self._to_offload.popleft())
        if self.last and not self._holding:
            self._fetch_for_next_step()

    def _awaited_before(self, index: int) -> list[SlideUnit]:
        """Return the units that backward needs next; those that are done may be updated."""
        return [unit for unit in reversed(self.units[:index]) if unit.index in self._awaited]

    def _free(self, unit: SlideUnit) -> None:
        """Free the slot of a unit that this backward pass uses no more, and fetch the next ones."""
        if unit in self.window:
            changes = self.last and unit.count
            # what the next forward pass begins with stays, unless it is about to be updated
            if changes or unit not in self.units[: self.window.slots]:
                self._release(unit)
            self._fetch_all(self._awaited_before(unit.index - 1))

    def _start_offload(self, unit: SlideUnit) -> None:
        self._offload.start(unit, self.first, self.last)
        if self.last and not self._holding:
            self._optimizer.update(unit)

    def _fetch_for_next_step(self) -> None:
        """Fetch what the next forward pass begins with to slots that backward needs no more.

        In the order of updates, which is the same on all ranks: these fetches wait for them.
        """
        for unit in reversed(self.units[: self.window.slots]):
            if unit in self._to_offload or unit.index in self._awaited:
                return
            self._fetch_all([unit], next_step=True)


class SlideModule(ScheduledModule):
    """Wrapper of `model` whose units are on the device while they are used.

    `schedule` and `owner` are set after `attach`.

    Args:
        plans: its units, in the order of their use; what is left makes up the root.
        units: the root, then those of `plans`, unbound.
        checkpointed: blocks that backward recomputes: what autograd saves then is used at once.
    """

    schedule: Schedule
    owner: Callable[[], object]
    """the engine, as long as there is one"""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[UnitPlan],
        units: Sequence[SlideUnit],
        checkpointed: Container[nn.Module],
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
        for index, (plan, unit) in enumerate(zip(plans, units[1:], strict=True)):
            for module in plan.modules:
                if unit.frozen_shapes:
                    module.register_forward_hook(partial(self._returned, index))
                if module not in checkpointed:
                    module.forward = self._saving_positions(module.forward)

    def attach_collectives(  # noqa: D102
        self, gradients: MakeCollective, weights: MakeCollective, replicas: MakeCollective
    ) -> Callable[[], None]:
        before = self.gather, self.reduce, self.average
        groups = self._groups
        self.gather = None if groups.gathers is None else weights(groups.gathers)
        self.reduce = None if groups.reductions is None else gradients(groups.reductions)
        self.average = None if groups.across is None else replicas(groups.across)

        def detach() -> None:
            self.gather, self.reduce, self.average = before

        return detach

    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the trained parameters of each unit."""
        return {unit.name: list(unit.shapes) for unit in self._units}

    def _returned(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if [*with_gradient(output)]:
            self.schedule.returned(index)

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

    def _saving_positions(self, forward: Callable[P, Result]) -> Callable[P, Result]:
        @wraps(forward)
        def saving(*args: P.args, **kwargs: P.kwargs) -> Result:
            _refuse_checkpoint()
            with self.schedule.window.saving_positions():
                return forward(*args, **kwargs)

        return saving


def _refuse_checkpoint() -> None:
    """Refuse a block within a checkpointed region.

    Our hooks would take what the block saves before those of the region, so nothing would be
    recomputed. torch has no public way to ask for the hooks that are active.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and hooks[0].__module__ == checkpoint.__name__:
        raise UserError(
            "slide: the model calls its blocks within torch.utils.checkpoint, where nothing would "
            "be computed again: set activation_checkpointing: full"
        )


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
