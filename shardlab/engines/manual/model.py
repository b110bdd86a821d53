"""A module whose parameters are sharded in flat vectors."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map

from shardlab.comm.collective import Attachable, MakeCollective
from shardlab.comm.hierarchy import subgroup
from shardlab.engines.common.mesh import SHARD, replica_group
from shardlab.engines.common.setup import Fill
from shardlab.engines.common.units import UnitPlan, owned_parameters
from shardlab.engines.manual.schedule import Collectives, Schedule
from shardlab.engines.manual.unit import FlatUnit
from shardlab.engines.scheduled.watch import watch, watch_gradients


class FlatSharded(nn.Module, Attachable):
    """Wrapper of `model` with 1/W of its parameters on each rank, in one vector per unit.

    `parameters()` are the shards, one per unit, which an optimizer updates. Their gradients are
    there after `finish()`, which follows the last backward pass of a step.

    Args:
        fill: the weights of `model`, float32 and the same on all ranks.
        plans: its units, in the order of their use; what is left makes up the root.
        mesh: [shards] or [replicas, shards].
        ahead, reduce_dtype: see `Schedule`.
        dtype: that the root computes in.
    """

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
        super().__init__()
        self._options = ahead, reduce_dtype
        self._group = mesh.get_group(SHARD)
        # a second group: reductions run concurrently with gathers, and each needs one order
        self._second = subgroup(self._group, dist.get_process_group_ranks(self._group))
        self._between = replica_group(mesh)
        # not a submodule: its parameters are views of vectors without memory most of the time
        self._model = [model]
        self.units = _units(model, plans, self._group, dtype, torch.device(mesh.device_type))
        """the root, then those of `plans`"""
        root, *units = self.units
        for plan, unit in zip(plans, units, strict=True):
            for module in plan.modules:
                fill(module)
            unit.store()  # before the next one is materialised: one whole unit at a time
        fill(model)
        root.store()
        self.shards = nn.ParameterList([unit.shard for unit in self.units])
        self._schedule: Schedule | None = None
        for index, plan in enumerate(plans):
            self._watch(index, plan, dtype)
        watch_gradients(self.units, self)

    @property
    def schedule(self) -> Schedule:
        """The schedule over the attached collectives."""
        assert self._schedule is not None, "attach comes before the first forward pass"
        return self._schedule

    def attach_collectives(  # noqa: D102
        self, gradients: MakeCollective, weights: MakeCollective, replicas: MakeCollective
    ) -> Callable[[], None]:
        before, (root, *units) = self._schedule, self.units
        average = None if self._between is None else replicas(self._between)
        collectives = Collectives(weights(self._group), gradients(self._second), average)
        self._schedule = Schedule(root, units, collectives, *self._options)

        def detach() -> None:
            self._schedule = before

        return detach

    def unit_names(self) -> dict[str, list[str]]:
        """Return the names of the parameters of each unit."""
        return {unit.name: list(unit.parameters) for unit in self.units}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        self.schedule.begin()
        return self._model[0](*args, **kwargs)

    def train(self, mode: bool = True) -> "FlatSharded":
        """Set the mode of the model, too, which is no submodule."""
        self._model[0].train(mode)
        return super().train(mode)

    def finish(self) -> None:
        """See `Schedule.finish`."""
        self.schedule.finish()

    def _watch(self, index: int, plan: UnitPlan, dtype: torch.dtype) -> None:
        """Register the hooks that call the schedule at every use of a unit."""
        watch(plan.modules, index, lambda: self.schedule)
        if plan.param_dtype == dtype:
            return
        for module in plan.modules:  # activations between units have the type of the root
            cast = partial(_cast_inputs, plan.param_dtype)
            module.register_forward_pre_hook(cast, with_kwargs=True)
            module.register_forward_hook(lambda *call: _cast(dtype, call[-1]))


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
