"""`slide`: main memory owns parameters and optimizer states, the device sees a window of layers."""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab.comm.collective import Collective
from shardlab.comm.hierarchy import subgroup
from shardlab.core.errors import UserError
from shardlab.core.strategy import Strategy
from shardlab.engines.base import Optimization, State, StepOutcome
from shardlab.engines.flat import laid_out, split_vector
from shardlab.engines.mesh import make_mesh
from shardlab.engines.module import BETAS, Fill, ModuleEngine
from shardlab.engines.norm import clip_coefficient, norm_of
from shardlab.engines.precision import dtype_of, uses_fp16
from shardlab.engines.slide.arrivals import UPDATED, Arrivals
from shardlab.engines.slide.copies import Copies, copies_for
from shardlab.engines.slide.departures import Departures
from shardlab.engines.slide.faults import Faults
from shardlab.engines.slide.groups import node_groups
from shardlab.engines.slide.model import Sliding
from shardlab.engines.slide.node import NodeMemory
from shardlab.engines.slide.processors import update_workers
from shardlab.engines.slide.schedule import Schedule
from shardlab.engines.slide.storing import share_memory, store
from shardlab.engines.slide.unit import Precision, SlidUnit
from shardlab.engines.slide.updates import Updates
from shardlab.engines.slide.window import Window
from shardlab.engines.units import checkpointing_modes, owned_parameters, plan_units
from shardlab.kernels.adam import Hyper

Result = TypeVar("Result")

_KINDS = ("parameter", "exp_avg", "exp_avg_sq")


class SlideEngine(ModuleEngine):
    """The ranks of a node share one optimizer in main memory; rank r updates chunk r of each unit.

    Several nodes hold copies of it; the ranks at one place of theirs average their gradients.

    Updates begin when the gradients of a unit are there, and the next use of the unit waits for
    them alone. With a limit of the gradient norm, or fp16, they begin when all gradients are there,
    and run beside the next forward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optimization: Optimization,
        group: dist.ProcessGroup,
        seed: int,
        device: torch.device,
        fill: Fill,
        copies: Copies | None = None,
        ranks_per_node: int | None = None,
    ) -> None:
        groups = node_groups(group, ranks_per_node)
        self._here, across = groups.here, groups.across
        self._rank, self._world_size = dist.get_rank(self._here), dist.get_world_size(self._here)
        self.nodes = 1 if across is None else dist.get_world_size(across)
        self._mesh = _mesh(group, self._here, self.nodes)
        alone = self._world_size == 1
        gathers = None if strategy.param_transfer == "full" or alone else self._like(group)
        reductions = None if alone else self._reductions(strategy, group)
        computed = dtype_of(strategy.param_dtype, device)
        landed = computed if reductions is None else dtype_of(strategy.reduce_dtype, device)
        self._sums = not alone and reductions is None
        plans = plan_units(model, strategy, device)
        slots = self._world_size if strategy.grad_sync == "cpu_reduce" else 1
        self.units = [
            SlidUnit(
                index, name, own, self._rank, self._world_size, Precision(computed, landed), slots
            )
            for index, (name, own) in enumerate(owned_parameters(model, plans))
        ]
        """the root, then the others in the order of their use"""
        self._copies = copies_for(device) if copies is None else copies
        self._memory = share_memory(self.units, self._here)
        store(model, plans, self.units, fill, device, self._copies)
        again = {b for b, mode in checkpointing_modes(model, strategy).items() if mode != "none"}
        module = Sliding(model, plans, self.units, again, gathers, reductions, across)
        super().__init__(module, strategy, optimization, seed, device)
        self._holding = optimization.clip is not None or uses_fp16(strategy, device)
        self._faults = Faults(self._memory.control)
        on_device = strategy.grad_sync == "gpu_reduce"
        self._updates = self._make_updates(None if on_device else module.reduce, module.average)
        departures = Departures(
            self._copies,
            self._updates,
            self._faults,
            module.reduce if on_device else None,
            landed,
            device,
        )
        module.schedule = self._make_schedule(module, departures, strategy, computed)
        self._schedule = module.schedule
        self._touched = True
        weakref.finalize(self, _leave, self._copies, self._updates, self._memory)

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
        """
        with self._faults.surfacing():
            if number == 0:
                self._begin(learning_rate)
            self._schedule.first, self._schedule.last = number == 0, number == count - 1

    def compute(self, call: Callable[[], Result]) -> Result:
        """Forward and backward of one micro-batch, which the call does; its gradients leave."""
        with self._faults.surfacing():
            result = call()
            self._schedule.finish()
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
            self._schedule.prefetch()
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
            yield unit.named(unit.vectors["parameter"])

    def shards(self) -> State:  # noqa: D102
        self.synchronize()
        self._touched = True
        kinds: State = {
            kind: {
                unit.name: laid_out(unit.vectors[kind][unit.own], unit.count, self._mesh)
                for unit in self.units
            }
            for kind in _KINDS
        }
        return kinds | {"step": {unit.name: unit.step for unit in self.units}}

    @property
    def place(self) -> tuple[int, int]:
        """This rank among those of its node, and how many these are."""
        return self._rank, self._world_size

    def in_main_memory(self) -> State:
        """Whole parameters and moments by their names, in the memory that all ranks update.

        To be called by all ranks together. Writing to it, on any rank, counts from the next step
        on, when all ranks have ended it. `step` is each rank's own, by the names of units.
        """
        self.synchronize()
        self._touched = True
        kinds: State = {
            kind: {
                name: part
                for unit in self.units
                for name, part in unit.named(unit.vectors[kind]).items()
            }
            for kind in _KINDS
        }
        return kinds | {"step": {unit.name: unit.step for unit in self.units}}

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:  # noqa: D102
        [shapes] = [unit.shapes for unit in self.units if unit.name == name]
        return split_vector(whole, shapes)

    def _begin(self, learning_rate: float) -> None:
        if self._touched:
            self._take_in()
        self._updates.begin()
        decay = self._optimization.weight_decay
        self._updates.hyper = Hyper(learning_rate, BETAS, weight_decay=decay)
        summed = self.nodes * (self._world_size if self._sums else 1)
        self._updates.scale = 1 / (summed * self._loss_scale.value)

    def _take_in(self) -> None:
        """What somebody may have written to `shards()`."""
        self._touched = False
        self._schedule.forget()
        dist.barrier(self._here)  # all have written
        for unit in self.units:
            unit.refresh()
        dist.barrier(self._here)

    def _norm(self) -> float:
        """Of the whole gradient, when all of it is in main memory."""
        squares = torch.tensor(self._updates.squares(), dtype=torch.float64)
        dist.all_reduce(squares, group=self._here)
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
            for unit in self.units:
                self._updates.start(unit, coefficient)
        if applied:
            self._handle.step_ended()
        else:
            self._handle.rollback()
        self._loss_scale.update(applied)

    def _like(self, group: dist.ProcessGroup, backend: str | None = None) -> dist.ProcessGroup:
        """Of the ranks of the node, for what runs beside other collectives."""
        return subgroup(group, dist.get_process_group_ranks(self._here), backend)

    def _reductions(self, strategy: Strategy, group: dist.ProcessGroup) -> dist.ProcessGroup | None:
        """For collectives of gradients on the device, or in main memory; None: sums of slots."""
        if strategy.grad_sync == "gpu_reduce":
            return self._like(group)
        if strategy.gradients.route == "native" and strategy.gradients.plain():
            return None
        return self._like(group, "gloo")

    def _make_updates(self, reduce: Collective | None, average: Collective | None) -> Updates:
        return Updates(
            self._memory.control,
            self._faults,
            self._world_size,
            self._sums,
            reduce,
            average,
            self.ledger,
            update_workers(self._here, self.device),
        )

    def _make_schedule(
        self, module: Sliding, departures: Departures, strategy: Strategy, computed: torch.dtype
    ) -> Schedule:
        root, *units = self.units
        arrivals = Arrivals(
            self._copies,
            self._memory.control,
            self._faults,
            module.gather,
            self.ledger,
            self._rank,
            self._world_size,
        )
        largest = max(unit.size for unit in units)
        return Schedule(
            root,
            units,
            torch.empty(root.size, dtype=computed, device=self.device),
            Window(strategy.window or 2, largest, computed, self.device),
            arrivals,
            departures,
            self._updates,
            self._holding,
        )


def _mesh(group: dist.ProcessGroup, here: dist.ProcessGroup, nodes: int) -> DeviceMesh:
    """[ranks] or [nodes, ranks], of main memory."""
    ranks, size = dist.get_process_group_ranks(group), dist.get_world_size(here)
    node = dist.get_rank(group) // size
    if dist.get_process_group_ranks(here) != ranks[node * size : (node + 1) * size]:
        raise UserError("slide: ranks of one node must follow each other: number them by node")
    return make_mesh(group, nodes, torch.device("cpu"))


def _leave(copies: Copies, updates: Updates, memory: NodeMemory) -> None:
    """In order, so that no rank takes this one for lost."""
    with suppress(Exception):
        updates.drain()
        copies.drain()
        memory.close()
