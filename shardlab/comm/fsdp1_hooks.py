"""Puts collectives into FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`) models.

`register_comm_hook(state, hook)` is for gradients alone: torch calls `hook(state, gradient, shard)`
with the padded flat gradient of one unit and the shard to fill, or `hook(state, gradient)` where
nothing is sharded (NO_SHARD), and leaves the averaging to the hook. It does not say whose gradient
it is, but keeps the state that it passes in each unit: after registration every unit gets its own
(torch 2.13, `torch/distributed/fsdp/_runtime_utils.py`, `_reduce_grad`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.collective import Collective
from shardlab.comm.names import plain
from shardlab.core.errors import UserError

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class _State(NamedTuple):
    """What a unit passes to its hook."""

    collective: Collective
    unit: Unit


def attach_fsdp1(
    model: nn.Module, gradients: Callable[[dist.ProcessGroup], Collective]
) -> Callable[[], None]:
    """Gives every unit of `model` our collective; returns a function that takes it out.

    Raises:
        UserError: hybrid sharding, or a hook is there already.
    """
    units = _units(model)
    for name, module in units.items():
        if module.sharding_strategy in _HYBRID:
            raise UserError(
                f"fsdp1: torch takes no communication hook for {module.sharding_strategy.name} "
                f"({name}): use fully_shard with a two-dimensional mesh"
            )
    inner = {m for unit in units.values() for m in unit.modules() if m is not unit}
    for root in (unit for unit in units.values() if unit not in inner):
        try:
            root.register_comm_hook(None, _average)
        except AssertionError as error:
            raise UserError(f"fsdp1: {error}") from None
    for name, module in units.items():
        assert module.process_group is not None, "set unless the strategy is hybrid"
        unit = Unit(name, _blocks(name, module))
        module._comm_hook_state = _State(gradients(module.process_group), unit)

    def detach() -> None:
        for module in units.values():
            module._comm_hook = None
            module._comm_hook_state = None

    return detach


def unit_names(model: nn.Module) -> dict[str, list[str]]:
    """The names of the parameters of each unit."""
    return {name: _names(name, unit) for name, unit in _units(model).items()}


def _units(model: nn.Module) -> dict[str, FullyShardedDataParallel]:
    return {
        plain(name) or "root": module
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }


def _names(name: str, unit: FullyShardedDataParallel) -> list[str]:
    prefix = "" if name == "root" else f"{name}."
    flat = unit._flat_param
    return [] if flat is None else [prefix + plain(each) for each in flat._fqns]


def _blocks(name: str, unit: FullyShardedDataParallel) -> tuple[Block, ...]:
    """One, without the padding at its end, whose length depends on the number of ranks."""
    flat = unit._flat_param
    if flat is None:
        return ()
    padding = flat._numels_with_padding[-1] if flat._is_padding_mask[-1] else 0
    return (Block(name, flat._unpadded_unsharded_size.numel() - padding, 1),)


def _average(state: _State, gradient: Tensor, shard: Tensor | None = None) -> None:
    """What FSDP1 calls for every flat gradient."""
    collective, unit = state
    scale = 1 / collective.world_size
    if shard is None:
        collective.all_reduce(gradient[: unit.blocks[0].rows], scale, unit)
    else:
        collective.reduce_scatter(shard, gradient, scale, unit)
