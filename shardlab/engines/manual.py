"""The `manual` engine: our own sharding, whose communication overlaps on every device."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardlab.comm.object_collectives import subgroup
from shardlab.comm.routes import Collectives
from shardlab.core.torch_private import tree_map
from shardlab.engines.base import EngineSetup, Fill
from shardlab.engines.flat import (
    SHARD,
    FlatEngine,
    FlatVector,
    make_mesh,
    mesh_copies,
    replica_group,
)
from shardlab.engines.manual_schedule import FlatUnit, ManualSchedule
from shardlab.engines.scheduling import ScheduledModule
from shardlab.models.units import UnitPlan, dtype_of, owned_parameters, plan_units


class ManualEngine(FlatEngine):
    """Engine with 1/W of a flat vector per unit, its gradient and optimizer state on each rank."""

    def __init__(self, model: nn.Module, setup: EngineSetup) -> None:
        strategy, device = setup.strategy, setup.device
        copies, rare = mesh_copies(strategy, setup.group), strategy.sync is not None
        self._mesh = make_mesh(setup.group, copies, device, always=rare)
        self._sharded = FlatSharded(
            model,
            setup.fill,
            plan_units(model, strategy, device),
            self._mesh,
            strategy.depths(),
            dtype_of(strategy.param_dtype, device),
            dtype_of(strategy.reduce_dtype, device),
        )
        super().__init__(self._sharded, setup)
        self._shards = self._mesh.get_group(SHARD)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        schedule = self._sharded.schedule
        schedule.reducing = False
        try:
            yield
        finally:
            schedule.reducing = True

    def _after_backward(self) -> None:
        self._sharded.schedule.after_backward()

    def _vectors(self) -> dict[str, FlatVector]:
        return {unit.name: FlatVector(unit.shard, unit.shapes) for unit in self._sharded.units}


class FlatSharded(ScheduledModule):
    """Wrapper of `model` with 1/W of its parameters on each rank, in one vector per unit.

    `parameters()` are the shards, one per unit, which an optimizer updates. Their gradients are
    there after `schedule.after_backward()`, which follows the last backward pass of a step.

    Args:
        fill: the weights of `model`, float32 and the same on all ranks.
        plans: its units, in the order of their use; what is left makes up the root.
        mesh: [shards] or [replicas, shards].
        ahead, reduce_dtype: see `ManualSchedule`.
        dtype: that the root computes in.
    """

    schedule: ManualSchedule
    """over the attached collectives"""

    def __init__(
        self,
        model: nn.Module,
        fill: Fill,
        plans: Sequence[UnitPlan],
        mesh: DeviceMesh,
        ahead: tuple[int, int] = (1, 1),
        dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
    ) -> None:
        group = mesh.get_group(SHARD)
        units = _units(model, plans, group, dtype, torch.device(mesh.device_type))
        root, *others = units
        for plan, unit in zip(plans, others, strict=True):
            for module in plan.modules:
                fill(module)
            unit.store()  # before the next one is materialised: one whole unit at a time
        fill(model)
        root.store()
        super().__init__(model, plans)
        for unit in units:
            # weak: autograd keeps these hooks where Python's garbage collector does not look, so
            # that nothing they refer to would ever be freed
            hook = partial(_accumulated, weakref.ref(self), weakref.ref(unit))
            for parameter in unit.parameters.values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(hook)
        self.units = units
        """the root, then those of `plans`"""
        self.shards = nn.ParameterList([unit.shard for unit in units])
        self._options = ahead, reduce_dtype
        self._group = group
        # a second group: reductions run concurrently with gathers, and each needs one order
        self._second = subgroup(group, dist.get_process_group_ranks(group))
        self.replica_group = replica_group(mesh)
        for plan in plans:
            if plan.param_dtype != dtype:
                for module in plan.modules:  # activations between units have the type of the root
                    cast = partial(_cast_inputs, plan.param_dtype)
                    module.register_forward_pre_hook(cast, with_kwargs=True)
                    module.register_forward_hook(lambda *call: _cast(dtype, call[-1]))

    def attach_collectives(self, collectives: Collectives) -> None:  # noqa: D102
        replicas = self.replica_group
        average = None if replicas is None else collectives.replicas(replicas)
        root, *others = self.units
        gather, reduce = collectives.weights(self._group), collectives.gradients(self._second)
        self.schedule = ManualSchedule(root, others, gather, reduce, average, *self._options)

    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each unit."""
        return {unit.name: list(unit.parameters) for unit in self.units}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.schedule.begin()
        return super().forward(*args, **kwargs)


def _accumulated(
    module: "weakref.ref[FlatSharded]", unit: "weakref.ref[FlatUnit]", _: Tensor
) -> None:
    here, whose = module(), unit()
    if here is not None and whose is not None:  # the model may outlive both
        here.schedule.accumulated(whose)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return _cast(dtype, args), _cast(dtype, kwargs)


def _cast(dtype: torch.dtype, tree: Any) -> Any:
    """Return a tree whose floating-point tensors have another type."""

    def one(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(one, tree)


def _units(
    model: nn.Module,
    plans: Sequence[UnitPlan],
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> list[FlatUnit]:
    """Return the root, then the others."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    (_, rest), *owned = owned_parameters(model, plans)
    units = [
        FlatUnit(
            name,
            own,
            rank,
            world_size,
            dtype=plan.param_dtype,
            kept=not plan.reshard_after_forward,
            needed_in_backward=plan.needed_in_backward,
            device=device,
        )
        for plan, (name, own) in zip(plans, owned, strict=True)
    ]
    return [FlatUnit("root", rest, rank, world_size, dtype=dtype, device=device), *units]
