"""The `slide` engine: layers are streamed from host memory through a window of device memory."""

import math
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.comm.object_collectives import run_or_fail_together
from shardlab.core.errors import UserError
from shardlab.engines.base import Engine, EngineSetup, EngineState, StepOutcome
from shardlab.engines.flat import laid_out, split_vector
from shardlab.engines.numerics import clip_coefficient, norm_of, read_together
from shardlab.engines.slide_groups import make_groups
from shardlab.engines.slide_memory import (
    FROZEN,
    KINDS,
    MOMENTS_VARIABLE,
    GradBuffers,
    SlideUnit,
    VectorLayout,
    chunk_of,
    shared_vectors,
)
from shardlab.engines.slide_optimizer import HostOptimizer, update_workers
from shardlab.engines.slide_schedule import SlideModule, SlideSchedule, refuse_shared
from shardlab.engines.slide_transfers import Copies, GradOffload, Prefetcher
from shardlab.kernels.adam import Hyper
from shardlab.models.streamed_layout import kept_gradients, window_slots
from shardlab.models.units import UnitPlan, dtype_of, owned_parameters, plan_units, uses_fp16

_T = TypeVar("_T")

_STATES = ("parameter", *KINDS)


class SlideEngine(Engine):
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
        strategy, device, optimization = setup.strategy, setup.device, setup.optimization
        self._holding = optimization.clip is not None or uses_fp16(strategy, device)
        """whether updates wait until the norm of the whole gradient is known"""
        self.groups = groups = make_groups(strategy, setup.group, ranks_per_node)
        on_device = strategy.grad_sync == "gpu_reduce"
        both = strategy.param_transfer == "shard" and on_device
        self._copies = copies = copies or Copies(device, one_thread=both)
        plans = plan_units(model, strategy, device)
        refuse_shared(model, plans)
        compute = dtype_of(strategy.param_dtype, device)
        reduced = compute if groups.reductions is None else dtype_of(strategy.reduce_dtype, device)
        moments = dtype_of(strategy.moment_dtype, device)
        self.units = units = [
            SlideUnit(index, name, parameters, groups.rank, groups.world_size, compute, moments)
            for index, (name, parameters) in enumerate(owned_parameters(model, plans))
        ]
        """the root, then the others in the order of their use"""
        root, *others = units
        self._trained = [unit for unit in units if unit.count]
        trained = [root, *(unit for unit in others if unit.count)]
        _allocate(units, groups.here, copies, on_disk=strategy.moments == "disk")
        keeping = kept_gradients(strategy.accumulation, self._holding)
        self._accumulation = strategy.accumulation
        buffers = GradBuffers(trained, groups, keeping, on_device, reduced, copies.pin)
        run_or_fail_together(
            groups.here,
            "slide: host memory cannot take the model",
            lambda: _store(model, plans, units, setup),
        )
        module = SlideModule(model, plans, units, groups)
        super().__init__(module, setup)  # attaches collectives to the module
        self._optimizer = HostOptimizer(
            groups,
            buffers,
            None if on_device else module.reduce,
            module.average,
            self.ledger,
            update_workers(groups.here, device),
            setup.seed,
        )
        self._schedule = SlideSchedule(
            root,
            others,
            window_slots(strategy, len(others)),
            Prefetcher(groups, copies, self.ledger, self._optimizer.updated, module.gather),
            GradOffload(
                copies,
                buffers,
                self._optimizer.receive,
                module.reduce if on_device else None,
                reduced,
                device,
            ),
            self._optimizer,
            self._holding,
        )
        # weak: the model may outlive the engine, and must not keep it
        module.schedule, module.owner = self._schedule, weakref.ref(self)
        self._touched = True
        self._broken: str | None = None
        """why no step may follow"""
        weakref.finalize(self, _close, os.getpid(), self._optimizer, copies)

    def step(  # noqa: D102
        self,
        micro_batches: Sequence[Tensor],
        learning_rate: float,
        seeds: Sequence[int | None] | None = None,
    ) -> StepOutcome:
        count, losses = len(micro_batches), []
        drawn = seeds or [None] * count
        for number, (batch, seed) in enumerate(zip(micro_batches, drawn, strict=True)):
            self.begin(number, count, learning_rate)
            losses.append(self.compute(partial(self._accumulate, batch, count, seed)))
        norm, applied = self.end()
        return StepOutcome(sum(read_together(*losses)) / count, norm, applied)

    def begin(self, number: int, count: int, learning_rate: float) -> None:
        """Begin micro-batch `number` of the `count` of a step; `compute` and `end` follow.

        Args:
            learning_rate: of the updates of this step.

        Raises:
            UserError: a step was broken off; or the engine was built for one micro-batch a step,
                and there are more; or for other parameters to be trained.
        """
        if self._broken is not None:
            raise UserError(self._broken)
        if count > 1 and self._accumulation == 1:
            raise UserError(
                f"slide: a step of {count} micro-batches, and host memory is laid out for 1: set "
                f"accumulation: {count} in the strategy"
            )
        for unit in self.units:
            unit.check()
        self._copies.check()
        self._optimizer.check()
        if number == 0:
            self._begin(learning_rate)
        self._schedule.first, self._schedule.last = number == 0, number == count - 1

    def compute(self, call: Callable[[], _T]) -> _T:
        """Run forward and backward of one micro-batch by a call; off-load its gradients.

        A call that fails before its backward pass has changed nothing and may be made again, but
        not with `param_transfer: shard` on several ranks, where others gather with this one.
        """
        self._schedule.in_step = True
        try:
            result = call()
            self._schedule.after_backward()
        except BaseException as error:
            begun = any(p.grad is not None for u in self.units for p in u.parameters.values())
            if begun or self._schedule.in_backward or self.groups.gathers is not None:
                self._break(error)
            raise
        finally:
            self._schedule.in_step = False
        return result

    def end(self) -> tuple[float, bool]:
        """Start the updates of a step, after its last micro-batch.

        Returns:
            as in `StepOutcome`: the norm of the gradient, and whether it is applied.
        """
        try:
            self._schedule.wait()
            norm = self._norm()
            applied = math.isfinite(norm)
            self._end(norm, applied)
            self._schedule.end_step()
        except BaseException as error:
            self._break(error)
            raise
        return norm, applied

    def _break(self, error: BaseException) -> None:
        """Refuse further steps; raise the first error of a thread in place of what it led to."""
        self._broken = (
            f"slide: a step was broken off ({type(error).__name__}) and parameters may be between "
            "two steps: continue from a checkpoint"
        )
        if isinstance(error, Exception):
            self._copies.check()
            self._optimizer.check()

    @property
    def loss_scale(self) -> float:
        """The factor of a loss before backward."""
        return self._loss_scale.value

    def synchronize(self) -> None:
        """Return when all updates are done, on all ranks."""
        try:
            self._optimizer.wait()
            self._copies.wait()
        except Exception as error:
            self._break(error)
            raise

    def wait(self) -> None:
        """Likewise: updates of a step would otherwise take time of what is timed after it."""
        self.synchronize()

    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:  # noqa: D102
        self.synchronize()
        for unit in self.units:
            yield unit.named("parameter") | unit.named(FROZEN)

    def shards(self) -> EngineState:
        """See `Engine.shards`, for trained parameters; moments in their own type."""
        self.synchronize()
        self._touched = True
        kinds: EngineState = {
            kind: {
                unit.name: laid_out(unit.vectors[kind][unit.shard], unit.count, self.groups.mesh)
                for unit in self._trained
            }
            for kind in _STATES
        }
        return kinds | {"step": {unit.name: unit.step for unit in self._trained}}

    def in_host_memory(self) -> EngineState:
        """Return whole parameters, moments and `frozen` parameters by name, in shared memory.

        All ranks call together. Reading costs the next step nothing; what is written, on any rank,
        counts after `take_in`. `step` is each rank's own, by the names of units.
        """
        self.synchronize()
        kinds: EngineState = {
            kind: {name: part for unit in self.units for name, part in unit.named(kind).items()}
            for kind in (*_STATES, FROZEN)
        }
        return kinds | {"step": {unit.name: unit.step for unit in self._trained}}

    def held_elements(self) -> int:
        """Return those of this rank's part of the host memory of its node."""
        place = self.groups.rank, self.groups.world_size
        kinds = [unit.vectors[kind] for unit in self.units for kind in ("parameter", FROZEN)]
        return sum(chunk_of(vector, *place).numel() for vector in kinds)

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:  # noqa: D102
        [shapes] = [unit.shapes for unit in self.units if unit.name == name]
        return split_vector(whole, shapes)

    def take_in(self) -> None:
        """Continue from what was written to `in_host_memory` or `shards`; all ranks call together.

        A step does so itself when it begins after `shards`.
        """
        self._touched = False
        self._schedule.forget()
        dist.barrier(self.groups.here)  # any rank may write to any chunk: wait for all
        for unit in self.units:
            unit.refresh()
        # no rank may update before all have read what was written
        dist.barrier(self.groups.here)

    def _begin(self, learning_rate: float) -> None:
        if self._touched:
            self.take_in()
        self._optimizer.begin_step()
        adamw, groups = self._optimization, self.groups
        hyper = Hyper(learning_rate, adamw.betas, adamw.eps, adamw.weight_decay)
        self._optimizer.hyper = hyper
        summed = groups.nodes * (groups.world_size if groups.sums else 1)
        self._optimizer.scale = 1 / (summed * self._loss_scale.value)

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
        if not applied:
            self._handle.rollback()
        self._handle.step()
        self._loss_scale.update(applied)


def _close(pid: int, optimizer: HostOptimizer, copies: Copies) -> None:
    """End the work of an engine that is collected, or whose process ends.

    Errors were raised by the calls that waited for what failed.
    """
    if os.getpid() != pid:
        return  # a fork: it has none of the threads that would be waited for
    with suppress(Exception):
        optimizer.wait()
    with suppress(Exception):
        copies.wait()
    copies.unpin()


def _allocate(
    units: Sequence[SlideUnit], here: dist.ProcessGroup, copies: Copies, on_disk: bool
) -> None:
    """Allocate host memory for units, and page-lock it; a node's ranks call together.

    Args:
        on_disk: the moments, which no device reads, lie in a file instead.

    Raises:
        UserError: there is too little.
    """
    layout: VectorLayout = {}
    moments: VectorLayout = {}
    for unit in units:
        layout |= unit.layout()
        moments |= unit.moment_layout()
    memory, vectors = shared_vectors(layout if on_disk else layout | moments, here)
    copies.pin(memory)
    if on_disk:
        folder = Path(os.environ.get(MOMENTS_VARIABLE, ".work/moments"))
        vectors |= shared_vectors(moments, here, folder)[1]
    for unit in units:
        unit.map(vectors)


def _store(
    model: nn.Module, plans: Sequence[UnitPlan], units: Sequence[SlideUnit], setup: EngineSetup
) -> None:
    """Move the weights to host memory, materialising one unit at a time.

    Args:
        units: the root, then those of `plans`.
    """
    root, *others = units
    modules = [*(plan.modules for plan in plans), (model,)]
    for unit, parts in zip((*others, root), modules, strict=True):
        for module in parts:
            setup.fill(module)
        unit.store()
        unit.place(setup.device)  # before the next unit has weights
