"""`slide`: host memory owns parameters and optimizer states, the device sees a window of layers."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.activations.checkpoint import scratch_folder
from shardlab.core.errors import UserError
from shardlab.engines.common.base import State, StepOutcome
from shardlab.engines.common.flat import laid_out, split_vector
from shardlab.engines.common.module import ModuleEngine
from shardlab.engines.common.norm import clip_coefficient, norm_of
from shardlab.engines.common.setup import Setup
from shardlab.engines.common.units import checkpointing_modes, plan_units
from shardlab.engines.slide.arrivals import UPDATED
from shardlab.engines.slide.assembly import (
    Parts,
    holding,
    make_landings,
    make_schedule,
    make_units,
    make_updates,
)
from shardlab.engines.slide.copies import Copies, copies_for
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.leaving import add_finalizer, leave
from shardlab.engines.slide.model import Sliding
from shardlab.engines.slide.moments import KINDS
from shardlab.engines.slide.ranks import ranks_for
from shardlab.engines.slide.storing import (
    moments_in_memory,
    moments_on_disk,
    share_memory,
    store,
)
from shardlab.engines.slide.unit import FROZEN
from shardlab.kernels.adam import Hyper
from shardlab.transport.object_collectives import run_or_fail_together

Result = TypeVar("Result")

_STATES = ("parameter", *KINDS)


class SlideEngine(ModuleEngine):
    """The ranks of a node share one optimizer in host memory; rank r updates chunk r of each unit.

    Several nodes hold copies of it; the ranks at one place of theirs average their gradients.

    Updates begin when the gradients of a unit are there, and the next use of the unit waits for
    them alone. With a limit of the gradient norm, or fp16, they begin when all gradients are there,
    and run beside the next forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        copies: Copies | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        strategy, device = setup.strategy, setup.device
        lent = ranks_for(strategy, setup.group, ranks_per_node)
        add_finalizer(self, lent.give_back)  # after `_leave`: what is told last, is done first
        self.ranks = ranks = lent.value
        plans = plan_units(model, strategy, device)
        self.units = make_units(model, plans, setup, ranks)
        """the root, then the others in the order of their use"""
        self._trained = trained = [unit for unit in self.units if unit.count]
        self._copies = copies_for(device) if copies is None else copies
        add_finalizer(self, self._copies.unpin)  # after `_leave`: what is told last goes first
        landings = make_landings(self.units, setup, ranks)
        self._memory = share_memory(self.units, landings, setup, ranks.here)
        self._moments = (
            moments_on_disk(trained, ranks.here, scratch_folder())
            if strategy.moments == "disk"
            else moments_in_memory(trained, self._memory)
        )
        given = model, plans, self.units, landings, setup, self._copies
        run_or_fail_together(
            ranks.here, "slide: host memory cannot take the model", lambda: store(*given)
        )
        again = {b for b, mode in checkpointing_modes(model, strategy).items() if mode != "none"}
        module = Sliding(model, plans, self.units, again, ranks)
        super().__init__(module, setup)
        self._holding = holding(setup)
        control = self._memory.control
        self._faults = Faults(control)
        parts = Parts(setup, ranks, self._copies, landings, control, self._faults, self.ledger)
        order = trained if self._holding else [*reversed(trained)]
        self._updates = make_updates(parts, module, self._moments, order)
        self._schedule = make_schedule(parts, module, self.units, self._updates)
        module.schedule, module.owner = self._schedule, weakref.ref(self)
        self._touched = True
        ending = self._updates, self._copies, self._moments, self._memory
        add_finalizer(self, leave, lent, self._faults, *ending)

    def step(self, micro_batches: Sequence[Tensor], learning_rate: float) -> StepOutcome:  # noqa: D102
        count, losses = len(micro_batches), []
        for number, batch in enumerate(micro_batches):
            self.begin(number, count, learning_rate)
            losses.append(self.compute(partial(self._accumulate, batch, count)))
        norm, applied = self.end()
        return StepOutcome(sum(losses) / count, norm, applied)

    def begin(self, number: int, count: int, learning_rate: float) -> None:
        """Before micro-batch `number` of the `count` of a step, which `compute` and `end` follow.

        Args:
            learning_rate: of the updates of this step.

        Raises:
            UserError: the engine was built for one micro-batch a step, and there are more; or for
                other parameters to be trained.
        """
        if count > 1 and self._optimization.accumulation == 1:
            raise UserError(
                f"slide: a step of {count} micro-batches, and host memory is laid out for 1: set "
                f"Optimization.accumulation to {count}"
            )
        for unit in self.units:
            unit.check()
        with self._faults.surfacing():
            if number == 0:
                self._begin(learning_rate)
            self._schedule.first, self._schedule.last = number == 0, number == count - 1

    def compute(self, call: Callable[[], Result]) -> Result:
        """Forward and backward of one micro-batch, which the call does; its gradients leave.

        A call that fails before its backward pass has changed nothing and may be made again, but
        not with `param_transfer: shard` on several ranks: the others gather parameters with this
        one, and all end with its error.
        """
        alone = self.ranks.gathers is None
        self._schedule.in_step = True
        try:
            with self._faults.surfacing(lambda: alone and not self._schedule.in_backward):
                result = call()
                self._schedule.finish()
        finally:
            self._schedule.in_step = False
        return result

    def end(self) -> tuple[float, bool]:
        """After the last micro-batch of a step: its updates have begun.

        Returns:
            as in `StepOutcome`: the norm of the gradient, and whether it is applied.
        """
        with self._faults.surfacing():
            norm = self._norm()
            applied = math.isfinite(norm)
            self._end(norm, applied)
            self._schedule.end_step()
        return norm, applied

    @property
    def loss_scale(self) -> float:
        """What a loss is multiplied by before backward."""
        return self._loss_scale.value

    def synchronize(self) -> None:
        """Returns when all updates are done, on all ranks."""
        with self._faults.surfacing():
            self._updates.drain()
            self._copies.drain()
            for unit in self.units:
                self._memory.control.wait(UPDATED, unit.index, unit.updates)

    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:  # noqa: D102
        self.synchronize()
        for unit in self.units:
            yield unit.named("parameter") | unit.named(FROZEN)

    def shards(self) -> State:
        """See `Engine.shards`, of what is trained; moments in their own type.

        Those on disk are mapped: host memory holds what is looked at, as long as it has room.

        Raises:
            UserError: (on all ranks of the node) the disk does not give them.
        """
        self._show_moments()
        self._touched = True
        kinds: State = {
            kind: {
                unit.name: laid_out(unit.vectors[kind][unit.own], unit.count, self.ranks.mesh)
                for unit in self._trained
            }
            for kind in _STATES
        }
        return kinds | {"step": {unit.name: unit.step for unit in self._trained}}

    def in_host_memory(self) -> State:
        """Whole parameters and moments by their names, in what all ranks update, and `frozen` ones.

        Moments on disk are mapped, see `shards`.

        To be called by all ranks together. Reading it costs the next step nothing; what is written
        to it, on any rank, counts after `take_in`. `step` is each rank's own, by the names of
        units.
        """
        self._show_moments()
        kinds: State = {
            kind: {name: part for unit in self.units for name, part in unit.named(kind).items()}
            for kind in (*_STATES, FROZEN)
        }
        return kinds | {"step": {unit.name: unit.step for unit in self._trained}}

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:  # noqa: D102
        [shapes] = [unit.shapes for unit in self.units if unit.name == name]
        return split_vector(whole, shapes)

    def _show_moments(self) -> None:
        """Where they are, those of all ranks."""
        self.synchronize()
        with self._faults.surfacing():
            run_or_fail_together(
                self.ranks.here, "slide: moments cannot be read", self._moments.look
            )

    def _begin(self, learning_rate: float) -> None:
        if self._touched:
            self.take_in()
        self._updates.begin()
        given, ranks = self._optimization, self.ranks
        hyper = Hyper(learning_rate, given.betas, given.eps, given.weight_decay)
        self._updates.hyper = hyper
        summed = ranks.nodes * (ranks.world_size if ranks.sums else 1)
        self._updates.scale = 1 / (summed * self._loss_scale.value)

    def take_in(self) -> None:
        """What was written to `in_host_memory` or `shards` counts; by all ranks together.

        A step does so, too, when it begins after `shards`.
        """
        self._touched = False
        self._schedule.forget()
        dist.barrier(self.ranks.here)  # all have written
        for unit in self.units:
            unit.refresh()
        self._moments.refresh()
        dist.barrier(self.ranks.here)

    def _norm(self) -> float:
        """Of the whole gradient, when all of it is in host memory."""
        squares = torch.tensor(self._updates.squares(), dtype=torch.float64)
        dist.all_reduce(squares, group=self.ranks.here)
        return norm_of(squares)

    def _end(self, norm: float, applied: bool) -> None:
        """After the last gradient of a step."""
        if not applied and not self._holding:
            raise UserError(
                f"slide: the gradient norm is {norm} and updates have begun: continue from a "
                "checkpoint with a lower learning rate, or set clip, which holds updates back "
                "until the norm is known"
            )
        if self._holding and applied:
            coefficient = clip_coefficient(norm, self._optimization.clip)
            for unit in self._trained:
                self._updates.start(unit, coefficient)
        if applied:
            self._handle.step_ended()
        else:
            self._handle.rollback()
        self._loss_scale.update(applied)
