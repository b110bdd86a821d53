"""The `slide` engine: layers are streamed from host memory through a window of device memory."""

import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.codecs.adam import Hyper
from shardlab.comm.object_collectives import run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.engines.activation_checkpoint import scratch_folder
from shardlab.engines.autograd import ModuleEngine
from shardlab.engines.base import EngineSetup, State, StepOutcome
from shardlab.engines.flat import laid_out, split_vector
from shardlab.engines.numerics import clip_coefficient, norm_of, read_together
from shardlab.engines.slide.build import (
    holds_updates,
    make_buffers,
    make_optimizer,
    make_schedule,
    make_units,
    moments_in_memory,
    moments_on_disk,
    share_memory,
    store_model,
)
from shardlab.engines.slide.copies import Copies, NodeContext, copies_for
from shardlab.engines.slide.error_relay import ErrorRelay
from shardlab.engines.slide.groups import PooledGroups, RankGroups, acquire_groups
from shardlab.engines.slide.model import SlideModule
from shardlab.engines.slide.moments import KINDS
from shardlab.engines.slide.rank_progress import UPDATED
from shardlab.engines.slide.unit import FROZEN
from shardlab.models.units import checkpointing_modes, plan_units

Result = TypeVar("Result")

_STATES = ("parameter", *KINDS)


class SlideEngine(ModuleEngine):
    """Engine with parameters and optimizer states in host memory, which a node's ranks share.

    Rank r of a node updates chunk r of each unit. Several nodes hold copies of the whole; the ranks
    at one position of them average their gradients.

    Updates begin when the gradients of a unit are in host memory, and the next use of the unit
    waits for them alone. With a limit of the gradient norm, or fp16, they begin when all gradients
    are there, and overlap with the next forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        setup: EngineSetup,
        copies: Copies | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        strategy, device = setup.strategy, setup.device
        with ExitStack() as resources:  # closes in reverse order, also when construction fails
            pooled = acquire_groups(strategy, setup.group, ranks_per_node)
            # closed last: all lanes communicate over these groups
            resources.callback(pooled.release)
            self.groups = groups = pooled.value
            plans = plan_units(model, strategy, device)
            self.units = units = make_units(model, plans, setup, groups)
            """the root, then the others in the order of their use"""
            self._trained = trained = [unit for unit in units if unit.count]
            self._copies = copies = copies or copies_for(device, strategy)
            # after the lanes: memory that a GPU copies from or to must stay page-locked
            resources.callback(copies.unpin)
            buffers = make_buffers(units, setup, groups)
            self._memory = share_memory(units, buffers, setup, groups.here)
            # after all threads: who leaves publishes nothing more, and others rely on it
            resources.callback(self._memory.close)
            self._moments = (
                moments_on_disk(trained, groups.here, scratch_folder())
                if strategy.moments == "disk"
                else moments_in_memory(trained, self._memory)
            )
            # after the optimizer, which loads and stores moments
            resources.callback(self._moments.close)
            # before memory closes: lanes wait for counters in it
            resources.callback(copies.drain)
            run_or_fail_together(
                groups.here,
                "slide: host memory cannot take the model",
                lambda: store_model(model, plans, units, buffers, setup, copies),
            )
            modes = checkpointing_modes(model, strategy)
            recomputed = {block for block, mode in modes.items() if mode != "none"}
            module = SlideModule(model, plans, units, recomputed, groups)
            super().__init__(module, setup)  # attaches collectives to the module
            self._holding = holds_updates(setup)
            progress = self._memory.progress
            self._errors = ErrorRelay(progress)
            context = NodeContext(groups, copies, progress, self._errors, self.ledger)
            order = trained if self._holding else [*reversed(trained)]
            self._optimizer = make_optimizer(setup, context, module, self._moments, order)
            # first: it waits for the copies of gradients, and takes longest
            resources.callback(self._optimizer.drain)
            self._schedule = make_schedule(setup, context, module, units, buffers, self._optimizer)
            # weak: the model may outlive the engine, and must not keep it
            module.schedule, module.owner = self._schedule, weakref.ref(self)
            self._touched = True
            owned = resources.pop_all()
        weakref.finalize(self, _close, os.getpid(), owned, pooled, self._errors)

    def step(self, micro_batches: Sequence[Tensor], learning_rate: float) -> StepOutcome:  # noqa: D102
        count, losses = len(micro_batches), []
        for number, batch in enumerate(micro_batches):
            self.begin(number, count, learning_rate)
            losses.append(self.compute(partial(self._accumulate, batch, count)))
        norm, applied = self.end()
        return StepOutcome(sum(read_together(*losses)) / count, norm, applied)

    def begin(self, number: int, count: int, learning_rate: float) -> None:
        """Begin micro-batch `number` of the `count` of a step; `compute` and `end` follow.

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
        with self._errors.raising():
            if number == 0:
                self._begin(learning_rate)
            self._schedule.first, self._schedule.last = number == 0, number == count - 1

    def compute(self, call: Callable[[], Result]) -> Result:
        """Run forward and backward of one micro-batch by a call; off-load its gradients.

        A call that fails before its backward pass has changed nothing and may be made again, but
        not with `param_transfer: shard` on several ranks: the others gather parameters with this
        one, and all end with its error.
        """
        alone = self.groups.gathers is None
        self._schedule.in_step = True
        try:
            with self._errors.raising(lambda: alone and not self._schedule.in_backward):
                result = call()
                self._schedule.finish()
        finally:
            self._schedule.in_step = False
        return result

    def end(self) -> tuple[float, bool]:
        """Start the updates of a step, after its last micro-batch.

        Returns:
            as in `StepOutcome`: the norm of the gradient, and whether it is applied.
        """
        with self._errors.raising():
            norm = self._norm()
            applied = math.isfinite(norm)
            self._end(norm, applied)
            self._schedule.end_step()
        return norm, applied

    @property
    def loss_scale(self) -> float:
        """The factor of a loss before backward."""
        return self._loss_scale.value

    def synchronize(self) -> None:
        """Return when all updates are done, on all ranks."""
        with self._errors.raising():
            self._optimizer.drain()
            self._copies.drain()
            for unit in self.units:
                self._memory.progress.wait(UPDATED, unit.index, unit.updates)

    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:  # noqa: D102
        self.synchronize()
        for unit in self.units:
            yield unit.named("parameter") | unit.named(FROZEN)

    def shards(self) -> State:
        """See `Engine.shards`, for trained parameters; moments in their own type.

        Those on disk are mapped: the page cache holds as much as fits of what is read.

        Raises:
            UserError: (on all ranks of the node) they cannot be read from disk.
        """
        self._populate_moments()
        self._touched = True
        kinds: State = {
            kind: {
                unit.name: laid_out(unit.vectors[kind][unit.own], unit.count, self.groups.mesh)
                for unit in self._trained
            }
            for kind in _STATES
        }
        return kinds | {"step": {unit.name: unit.step for unit in self._trained}}

    def in_host_memory(self) -> State:
        """Return whole parameters, moments and `frozen` parameters by name, in shared memory.

        Moments on disk are mapped, see `shards`. All ranks call together. Reading costs the next
        step nothing; what is written, on any rank, counts after `take_in`. `step` is each rank's
        own, by the names of units.
        """
        self._populate_moments()
        kinds: State = {
            kind: {name: part for unit in self.units for name, part in unit.named(kind).items()}
            for kind in (*_STATES, FROZEN)
        }
        return kinds | {"step": {unit.name: unit.step for unit in self._trained}}

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:  # noqa: D102
        [shapes] = [unit.shapes for unit in self.units if unit.name == name]
        return split_vector(whole, shapes)

    def _populate_moments(self) -> None:
        """Make the moments of all ranks readable where they are."""
        self.synchronize()
        with self._errors.raising():
            run_or_fail_together(
                self.groups.here, "slide: moments cannot be read", self._moments.populate
            )

    def _begin(self, learning_rate: float) -> None:
        if self._touched:
            self.take_in()
        self._optimizer.begin_step()
        given, groups = self._optimization, self.groups
        hyper = Hyper(learning_rate, given.betas, given.eps, given.weight_decay)
        self._optimizer.hyper = hyper
        summed = groups.nodes * (groups.world_size if groups.sums else 1)
        self._optimizer.scale = 1 / (summed * self._loss_scale.value)

    def take_in(self) -> None:
        """Continue from what was written to `in_host_memory` or `shards`; all ranks call together.

        A step does so itself when it begins after `shards`.
        """
        self._touched = False
        self._schedule.forget()
        dist.barrier(self.groups.here)  # any rank may write to any chunk: wait for all
        for unit in self.units:
            unit.refresh()
        self._moments.refresh()
        # no rank may update before all have read what was written
        dist.barrier(self.groups.here)

    def _norm(self) -> float:
        """Return the norm of the whole gradient, when all of it is in host memory."""
        squares = torch.tensor(self._optimizer.sum_of_squares(), dtype=torch.float64)
        dist.all_reduce(squares, group=self.groups.here)
        return norm_of(squares.item())

    def _end(self, norm: float, applied: bool) -> None:
        """Apply the gradient, or leave the step out."""
        if not applied and not self._holding:
            raise UserError(
                f"slide: the gradient norm is {norm} and updates have begun: continue from a "
                "checkpoint with a lower learning rate, or set clip, which holds updates back "
                "until the norm is known"
            )
        if self._holding and applied:
            coefficient = clip_coefficient(norm, self._optimization.clip)
            for unit in self._trained:
                self._optimizer.update(unit, coefficient)
        if applied:
            self._handle.step_ended()
        else:
            self._handle.rollback()
        self._loss_scale.update(applied)


def _close(
    pid: int, resources: ExitStack, pooled: PooledGroups[RankGroups], errors: ErrorRelay
) -> None:
    """Close what an engine has opened, when it is collected or its process ends.

    All of it, whatever goes wrong, and in an order that no rank takes this one for lost.

    Raises:
        Exception: the first error of the engine, unless the training thread has raised it.
    """
    if os.getpid() != pid:
        return  # a fork: it has none of the threads that would be waited for
    raised = errors.raised  # before `check`, which sets it
    try:
        resources.close()
        errors.check()
    except Exception:
        # messages that were broken off would reach the next engine
        pooled.discard()
        if raised:
            return  # the training thread has raised the cause: this is what it led to
        errors.check()  # the cause, if it is known, in place of what it led to
        raise
