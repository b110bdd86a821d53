"""Collectives of FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`) models, unit by unit.

`register_comm_hook(state, hook)` is for gradients alone: torch calls `hook(state, gradient, shard)`
with the padded flat gradient of one unit and the shard to fill, or `hook(state, gradient)` without
sharding (NO_SHARD); the hook averages. The arguments do not name the unit, but each unit keeps the
state that is passed to its hook, which is replaced after registration by one of the unit (torch
2.13, `torch/distributed/fsdp/_runtime_utils.py`, `_reduce_grad`).

There is no hook for parameters: the method of a unit's handle that gathers them is replaced
(`_flat_param.py`, `_all_gather_flat_param`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.fsdp._flat_param import FlatParamHandle

from shardlab.codecs.unit import Block, Unit
from shardlab.comm.collective import Collective, MakeCollective
from shardlab.comm.layout import REPLICAS
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.models.unit_names import plain

_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


class _State(NamedTuple):
    """State that torch passes to the hook of a unit."""

    collective: Collective
    unit: Unit
    between: Collective | None
    """over the replicas"""


def attach_fsdp1(
    model: nn.Module,
    gradients: MakeCollective,
    weights: MakeCollective,
    replicas: MakeCollective,
    between: dist.ProcessGroup | None = None,
) -> Callable[[], None]:
    """Use these collectives for every unit of `model`; return a function that restores torch's.

    Args:
        replicas: of gradients, between replicas of the model.
        between: the ranks that hold the same shard in other replicas.

    Raises:
        UserError: hybrid sharding, or a hook is registered already.
    """
    found = units(model)
    for name, module in found.items():
        if module.sharding_strategy in _HYBRID:
            raise UserError(
                f"fsdp1: torch takes no communication hook for {module.sharding_strategy.name} "
                f"({name}): use fully_shard with a two-dimensional mesh"
            )
    # torch registers a hook from a root in all its units
    inner = {m for unit in found.values() for m in unit.modules() if m is not unit}
    for root in (unit for unit in found.values() if unit not in inner):
        try:
            root.register_comm_hook(None, _average)
        except AssertionError as error:
            raise UserError(f"fsdp1: {error}") from None
    among = None if between is None else replicas(between)
    for name, module in found.items():
        assert module.process_group is not None, "set unless the strategy is hybrid"
        unit = Unit(name, _blocks(name, module))
        # private attributes, as the module's docstring says: torch 2.13 has no public ones
        module._comm_hook_state = _State(gradients(module.process_group), unit, among)
        if module._handle is not None and module._handle.uses_sharded_strategy:
            _clear_padding(module._handle)
            gather = partial(_gather, module._handle, weights(module.process_group), unit)
            module._handle._all_gather_flat_param = gather  # type: ignore[method-assign]

    def detach() -> None:
        for module in found.values():
            # without a hook torch's own reduction runs again
            module._comm_hook = None
            module._comm_hook_state = None
            if module._handle is not None:
                vars(module._handle).pop("_all_gather_flat_param", None)

    return detach


def unit_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each unit."""
    names = {}
    for name, unit in units(model).items():
        prefix = "" if name == "root" else f"{name}."
        flat = unit._flat_param
        names[name] = [] if flat is None else [prefix + plain(each) for each in flat._fqns]
    return names


def units(model: nn.Module) -> dict[str, FullyShardedDataParallel]:
    """Return the units by name."""
    return {
        plain(name) or "root": module
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel)
    }


def _blocks(name: str, unit: FullyShardedDataParallel) -> tuple[Block, ...]:
    """Return one block, without the padding at its end, which depends on the number of ranks."""
    flat = unit._flat_param
    if flat is None:
        return ()
    padding = flat._numels_with_padding[-1] if flat._is_padding_mask[-1] else 0
    return (Block(name, flat._unpadded_unsharded_size.numel() - padding, 1),)


def _average(state: _State, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Average a flat gradient; FSDP1 calls it."""
    collective, unit, between = state
    scale = 1 / collective.world_size
    if collective.world_size == 1:
        return
    if shard is None:
        collective.all_reduce(gradient[: unit.blocks[0].rows], scale, unit)
    else:
        collective.reduce_scatter(shard, gradient, scale, unit)
    if shard is not None and between is not None:
        part = Unit(unit.name + REPLICAS, (Block(unit.name, shard.numel(), 1),))
        between.all_reduce(shard, 1 / between.world_size, part)


def _clear_padding(handle: FlatParamHandle) -> None:
    """Set padding to 0: torch's 42 would widen the range of a group of quantized parameters."""
    flat = handle.flat_param
    shard = flat.data
    first, end = handle.rank * shard.numel(), 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        start, end = end, end + numel
        if padding:
            shard[max(start - first, 0) : max(end - first, 0)].zero_()
    shard[max(end - first, 0) :].zero_()


def _gather(handle: FlatParamHandle, collective: Collective, unit: Unit, whole: Tensor) -> Tensor:
    """Gather the parameters of a unit into `whole`; FSDP1 calls it."""
    if handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS:
        # exact, since these parameters are saved or read by the user
        return FlatParamHandle._all_gather_flat_param(handle, whole)
    shard = handle.flat_param.data
    collective.all_gather(whole, shard, unit)
    accelerator = accelerator_of(shard.device)
    if handle._offload_params and accelerator is not None:
        # FSDP1 has copied it to the device on another stream, and frees it when this returns
        accelerator.current_stream().uses(shard)
    return whole
