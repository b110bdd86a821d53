"""Collectives of FSDP1 models, through `register_comm_hook`.

FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`) calls `hook(state, gradient, shard)` with
the padded flat gradient of one unit and the shard to fill, or `hook(state, gradient)` without
sharding (NO_SHARD); the hook averages. The arguments do not name the unit, but each unit keeps the
state that is passed to its hook, which is replaced after registration by one of the unit (torch
2.13, `torch/distributed/fsdp/_runtime_utils.py`, `_reduce_grad`). There is no hook for parameters:
the method of a unit's handle that gathers them is replaced (`_flat_param.py`,
`_all_gather_flat_param`).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardlab.codecs.base import Block, Unit
from shardlab.comm.collective import REPLICAS, Collective
from shardlab.comm.routes import Collectives
from shardlab.core import torch_private
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.models.names import plain


class _HookState(NamedTuple):
    """State that torch passes to the hook of a unit."""

    collective: Collective
    unit: Unit
    between: Collective | None
    """over the replicas"""
    gathers: Collective | None
    """of its parameters, where they are sharded"""


def attach_fsdp1(
    model: nn.Module, collectives: Collectives, between: dist.ProcessGroup | None = None
) -> Callable[[], None]:
    """Use these collectives for every unit of `model`; return a function that restores torch's.

    Args:
        between: the ranks that hold the same shard in other replicas.

    Raises:
        UserError: hybrid sharding, or a hook is registered already.
    """
    named = units(model)
    for name, module in named.items():
        if module.sharding_strategy in torch_private.HYBRID:
            raise UserError(
                f"fsdp1: torch takes no communication hook for {module.sharding_strategy.name} "
                f"({name}): use fully_shard with a two-dimensional mesh"
            )
    # torch registers a hook from a root in all its units
    inner = {m for unit in named.values() for m in unit.modules() if m is not unit}
    for root in (unit for unit in named.values() if unit not in inner):
        try:
            root.register_comm_hook(None, _average)
        except AssertionError as error:
            raise UserError(f"fsdp1: {error}: call detach() of an earlier handle first") from None
    average = None if between is None else collectives.replicas(between)
    for name, module in named.items():
        assert module.process_group is not None, "set unless the strategy is hybrid"
        unit = Unit(name, _blocks(name, module))
        handle, gathers = torch_private.handle_of(module), None
        if handle is not None and handle.uses_sharded_strategy:
            _clear_padding(handle)
            gathers = collectives.weights(module.process_group)
            torch_private.set_gather(handle, partial(_gather, handle, gathers, unit))
        reduction = collectives.gradients(module.process_group)
        state = _HookState(reduction, unit, average, gathers)
        torch_private.set_hook_state(module, state)

    def detach() -> None:
        for module in named.values():
            torch_private.restore_fsdp1(module)

    return detach


def unit_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each unit."""
    names = {}
    for name, unit in units(model).items():
        prefix = "" if name == "root" else f"{name}."
        flat = torch_private.flat_parameter(unit)
        inside = () if flat is None else torch_private.flat_names(flat)
        names[name] = [prefix + plain(fqn) for fqn in inside]
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
    flat = torch_private.flat_parameter(unit)
    if flat is None:
        return ()
    last, is_padding = torch_private.flat_parts(flat)[-1]
    padding = last if is_padding else 0
    return (Block(name, torch_private.flat_numel(flat) - padding, 1),)


def _average(state: _HookState, gradient: Tensor, shard: Tensor | None = None) -> None:
    """Average a flat gradient; FSDP1 calls it."""
    collective, unit, between, gathers = state
    if gathers is not None:  # one that stays gathered after forward is not gathered in backward
        gathers.note_pass(unit, True)
    scale = 1 / collective.world_size
    if shard is not None:
        collective.reduce_scatter(shard, gradient, scale, unit)
    else:
        # also a group of one, whose strategy torch makes NO_SHARD
        shard = gradient[: unit.blocks[0].rows]
        if collective.world_size > 1:
            collective.all_reduce(shard, scale, unit)
    if between is not None:
        part = Unit(unit.name + REPLICAS, (Block(unit.name, shard.numel(), 1),))
        between.all_reduce(shard, 1 / between.world_size, part)


def _clear_padding(handle: torch_private.FlatParamHandle) -> None:
    """Set padding to 0: torch's 42 would widen the range of a group of quantized parameters."""
    flat = handle.flat_param
    shard = flat.data
    first, end = handle.rank * shard.numel(), 0
    for numel, padding in torch_private.flat_parts(flat):
        start, end = end, end + numel
        if padding:
            shard[max(start - first, 0) : max(end - first, 0)].zero_()
    shard[max(end - first, 0) :].zero_()


def _gather(
    handle: torch_private.FlatParamHandle, collective: Collective, unit: Unit, whole: Tensor
) -> Tensor:
    """Gather the parameters of a unit into `whole`; FSDP1 calls it."""
    if torch_private.is_summoned(handle):
        # exact, since these parameters are saved or read by the user
        return torch_private.gather_by_torch(handle, whole)
    shard = handle.flat_param.data
    collective.note_pass(unit, torch_private.in_backward())
    collective.all_gather(whole, shard, unit)
    accelerator = accelerator_of(shard.device)
    if torch_private.is_offloaded(handle) and accelerator is not None:
        # FSDP1 has copied it to the device on another stream, and frees it when this returns
        shard.record_stream(accelerator.current_stream())
    return whole
