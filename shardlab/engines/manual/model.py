"""A model whose parameters are sharded by hand."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves

from shardlab.comm.attachable import Attachable, MakeCollective
from shardlab.comm.names import parameter_names, plain
from shardlab.engines.manual.schedule import Schedule
from shardlab.engines.manual.unit import FlatUnit


class FlatSharded(nn.Module, Attachable):
    """`model`, of whose parameters every rank holds 1/W, in one vector per block.

    `parameters()` are the shards, one per unit: what an optimizer updates. After the last backward
    pass of a step comes `finish()`, then their gradients are there.

    Args:
        model: float32, with the same weights on every rank of `group`.
        blocks: its units, in the order of their use; what is left makes up the root unit.
        depth, reshard: see `Schedule`.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        group: dist.ProcessGroup,
        depth: int = 1,
        reshard: bool = True,
    ) -> None:
        super().__init__()
        self._options = depth, reshard
        self._group = group
        # reductions run beside gathers
        self._second = dist.new_group(dist.get_process_group_ranks(group))
        self._blocks = list(blocks)
        # not a submodule: its parameters are views of what is not there most of the time
        self._model = [model]
        self._names = parameter_names(model)
        self._units = _units(model, self._blocks, group)
        self.shards = nn.ParameterList([unit.shard for unit in self._units])
        self._schedule: Schedule | None = None
        for index, block in enumerate(self._blocks):
            block.register_forward_pre_hook(partial(self._before, index))
            block.register_forward_hook(partial(self._after, index))
        for unit in self._units:
            for parameter in unit.parameters.values():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda _, unit=unit: self.schedule.accumulated(unit)
                    )

    @property
    def schedule(self) -> Schedule:
        """Of the collectives that were attached."""
        assert self._schedule is not None, "attach comes before the first forward pass"
        return self._schedule

    def attach_collectives(  # noqa: D102
        self, gradients: MakeCollective, weights: MakeCollective
    ) -> Callable[[], None]:
        root, *units = self._units
        self._schedule = Schedule(
            root, units, weights(self._group), gradients(self._second), *self._options
        )
        return lambda: None

    def unit_names(self) -> dict[str, list[str]]:
        """The names of the parameters of each unit."""
        return {unit.name: list(unit.parameters) for unit in self._units}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """That of the model."""
        self.schedule.begin()
        return self._model[0](*args, **kwargs)

    def finish(self) -> None:
        """See `Schedule.finish`."""
        self.schedule.finish()

    def full_parameters(self) -> dict[str, Tensor]:
        """Copies of all parameters by all of their names, on every rank."""
        full: dict[str, Tensor] = {}

        def take(unit: FlatUnit) -> None:
            full.update({name: part.clone() for name, part in unit.named(unit.full).items()})

        self.schedule.all_gathered(take)
        return {name: full[known[0]] for known in self._names.values() for name in known}

    def shards_by_unit(self) -> dict[str, nn.Parameter]:
        """`parameters()` by the names of their units."""
        return {unit.name: unit.shard for unit in self._units}

    def as_dtensor(self, name: str, local: Tensor) -> Tensor:
        """A tensor that is laid out as the shard of a unit, without the zeros at its end.

        Args:
            local: shares its memory with the result; a scalar is returned as it is.
        """
        if local.dim() == 0:
            return local
        count = sum(p.numel() for p in self._unit(name).parameters.values())
        begin = dist.get_rank(self._group) * local.numel()
        valid = local[: max(0, count - begin)]
        shape, stride = torch.Size((count,)), (1,)
        return DTensor.from_local(valid, self._mesh, [Shard(0)], shape=shape, stride=stride)

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """A vector of a whole unit by the names of its parameters, or a scalar for each of them."""
        unit = self._unit(name)
        return dict.fromkeys(unit.parameters, whole) if whole.dim() == 0 else unit.named(whole)

    @cached_property
    def _mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._group, self.shards[0].device.type)

    def _unit(self, name: str) -> FlatUnit:
        return next(unit for unit in self._units if unit.name == name)

    def _before(self, index: int, *_: Any) -> None:
        self.schedule.before_forward(index)

    def _after(self, index: int, module: nn.Module, inputs: Any, output: Any) -> None:
        self.schedule.after_forward(index)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _: self.schedule.before_backward(index))


def _units(
    model: nn.Module, blocks: Sequence[nn.Module], group: dist.ProcessGroup
) -> list[FlatUnit]:
    """The root, then a unit for each block; a parameter belongs to the first module that has it."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    names = {parameter: plain(name) for name, parameter in model.named_parameters()}
    paths = {module: plain(name) for name, module in model.named_modules()}
    units = []
    for block in blocks:
        own = {names[p]: p for p in block.parameters() if p in names}
        units.append(FlatUnit(paths[block], own, rank, world_size))
        for parameter in own.values():
            del names[parameter]
    rest = {name: parameter for parameter, name in names.items()}
    return [FlatUnit("root", rest, rank, world_size), *units]
