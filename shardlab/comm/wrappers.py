"""The wrapper of a model, which decides where its collectives go."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from shardlab.comm import fsdp1_hooks, fsdp2_hooks
from shardlab.comm.background import Lanes
from shardlab.comm.ddp_hooks import attach_ddp
from shardlab.comm.routes import Attachable, Collectives
from shardlab.core.device import accelerator_of
from shardlab.core.errors import UserError
from shardlab.models.names import matching, parameter_names, whole_units

_WRAPPERS = Attachable, FSDPModule, FullyShardedDataParallel, DistributedDataParallel


def find_wrapper(model: nn.Module) -> nn.Module:
    """Return the wrapper, which may be a submodule of `model`: the root of its units.

    Raises:
        UserError: there is none, or several that would need hooks of their own.
    """
    wrappers: dict[object, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        kind = next((kind for kind in _WRAPPERS if isinstance(module, kind)), None)
        if kind is not None:
            # units of one kind are attached together, but each DistributedDataParallel alone
            key = kind if kind in (FSDPModule, FullyShardedDataParallel) else module
            wrappers.setdefault(key, (name or "the model itself", module))
    if not wrappers:
        raise UserError(
            f"attach: {type(model).__name__} is wrapped neither by fully_shard nor by "
            "FullyShardedDataParallel or DistributedDataParallel: wrap it first, or give what "
            "wraps it (transformers' Trainer wraps it on several ranks of torchrun: take "
            "shardlab.hf.CompressionCallback)"
        )
    if len(wrappers) > 1:
        names = ", ".join(f"{name} ({type(module).__name__})" for name, module in wrappers.values())
        raise UserError(f"attach: several wrappers, {names}: attach to each of them alone")
    return next(iter(wrappers.values()))[1]


def check_wrapper(
    model: nn.Module,
    wrapper: nn.Module,
    replicas: dist.ProcessGroup | None,
    has_sync: bool,
    overlap: bool,
) -> None:
    """Raise `UserError` for arguments that are for another wrapper."""
    if replicas is not None and not isinstance(
        wrapper, FSDPModule if has_sync else FullyShardedDataParallel
    ):
        raise UserError(
            "attach: replicas is for FullyShardedDataParallel, or fully_shard with sync: remove it"
        )
    is_on_cpu = not any(accelerator_of(parameter.device) for parameter in model.parameters())
    if overlap and not (isinstance(wrapper, FSDPModule) and is_on_cpu):
        raise UserError(
            "attach: overlap is for fully_shard on CPUs, where there are no streams: remove it"
        )


def excluded_blocks(
    model: nn.Module, wrapper: nn.Module, patterns: Sequence[str]
) -> frozenset[str]:
    """Return the names of the blocks that the patterns of parameters select."""
    if isinstance(wrapper, Attachable):
        return whole_units(wrapper.unit_names(), patterns)
    if isinstance(wrapper, FullyShardedDataParallel):
        return whole_units(fsdp1_hooks.unit_names(model), patterns)
    module = wrapper.module if isinstance(wrapper, DistributedDataParallel) else model
    return matching(patterns, parameter_names(module).values())


def message_names(model: nn.Module, wrapper: nn.Module) -> frozenset[str] | None:
    """Return the names that messages may have; None for DDP, which numbers them in its first pass.

    A message may have a part of a unit, whose name goes on behind that of the unit.
    """
    if isinstance(wrapper, Attachable):
        return frozenset(wrapper.unit_names())
    if isinstance(wrapper, FSDPModule):
        return frozenset(fsdp2_hooks.unit_names(model))
    if isinstance(wrapper, FullyShardedDataParallel):
        return frozenset(fsdp1_hooks.unit_names(model))
    return None


def attach_wrapper(
    model: nn.Module,
    wrapper: nn.Module,
    collectives: Collectives,
    lanes: Lanes | None,
    replicas: dist.ProcessGroup | None,
) -> Callable[[], None]:
    """Use the collectives; return a function that restores those of torch."""
    if isinstance(wrapper, Attachable):
        if wrapper.is_attached:
            raise UserError("attach: the engine of this model has attached it already: build anew")
        wrapper.attach_collectives(collectives)
        wrapper.is_attached = True
        return lambda: None  # it has no communication of torch that could be restored
    if isinstance(wrapper, FSDPModule):
        return fsdp2_hooks.attach_fsdp2(model, collectives, lanes)
    if isinstance(wrapper, FullyShardedDataParallel):
        return fsdp1_hooks.attach_fsdp1(model, collectives, replicas)
    assert isinstance(wrapper, DistributedDataParallel), "the only wrapper that is left"
    return attach_ddp(wrapper, collectives)
