"""`fsdp2`: torch's fully_shard, parameters sharded per unit and gathered for use."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from shardlab.core import torch_private
from shardlab.core.errors import UserError
from shardlab.engines.autograd import AutogradEngine
from shardlab.engines.base import EngineSetup, Fill
from shardlab.engines.flat import SHARD, make_mesh, mesh_replicas
from shardlab.models.units import dtype_of, plan_units
from shardlab.strategy.document import CanonicalStrategy


class FSDP2Engine(AutogradEngine):
    """Engine with a part of each parameter, gradient and optimizer state on each rank of a copy."""

    def __init__(self, model: nn.Module, setup: EngineSetup) -> None:
        strategy, device = setup.strategy, setup.device
        replicas, rare = mesh_replicas(strategy, setup.group), strategy.sync is not None
        mesh = make_mesh(setup.group, replicas, device, always=rare)
        units, self._root = shard_model(model, strategy, mesh, device, setup.fill)
        streams = device.type != "cpu"
        asynchronous = gathers_asynchronously(strategy, streams)
        # elsewhere streams do what our threads do on a CPU
        super().__init__(model, setup, overlap=asynchronous and not streams)
        if asynchronous and streams:
            for unit in (self._root, *units):
                torch_private.gather_asynchronously(unit, True)
        gather_ahead(self._root, units, *strategy.depths())
        self._shards = mesh.get_group(SHARD)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)


def gathers_asynchronously(strategy: CanonicalStrategy, streams: bool) -> bool:
    """Return whether gathers are asynchronous operations.

    Args:
        streams: the device has them; torch then launches asynchronous gathers, with their encoding
            and decoding, on the stream of computation, and prefetch does not need them.

    Raises:
        UserError: prefetch without effect.
    """
    ahead, asked = any(strategy.depths()), strategy.async_unshard
    if ahead and asked is False and not streams:
        raise UserError(
            "async_unshard: without it prefetch does nothing on a CPU: remove one of them"
        )
    return (ahead and not streams) if asked is None else asked


def shard_model(
    model: nn.Module,
    strategy: CanonicalStrategy,
    mesh: DeviceMesh,
    device: torch.device,
    fill: Fill,
) -> tuple[list[FSDPModule], FSDPModule]:
    """Return the units and the root of a model that is sharded by a strategy's canonical form."""
    shard = partial(
        fully_shard,
        mesh=mesh,
        offload_policy=CPUOffloadPolicy() if strategy.offload else OffloadPolicy(),
        shard_placement_fn=_placement(strategy, mesh.size(-1)),
    )
    computed, reduced = (
        dtype_of(name, device) for name in (strategy.param_dtype, strategy.reduce_dtype)
    )
    units: list[FSDPModule] = []
    for plan in plan_units(model, strategy, device):
        # between units activations keep one type
        output = None if plan.param_dtype == computed else computed
        policy = MixedPrecisionPolicy(plan.param_dtype, reduced, output)
        for module in plan.modules:  # sharded at once: no rank holds more whole units
            fill(module)
        freed = plan.reshard_after_forward or False
        shard([*plan.modules], reshard_after_forward=freed, mp_policy=policy)
        unit = cast(FSDPModule, plan.modules[0])
        unit.set_unshard_in_backward(plan.needed_in_backward)
        units.append(unit)
    returned = None if strategy.output_dtype is None else dtype_of(strategy.output_dtype, device)
    policy = MixedPrecisionPolicy(computed, reduced, returned)
    fill(model)
    # backward begins where forward ended: what the root gathered is needed again at once
    return units, shard(model, reshard_after_forward=False, mp_policy=policy)


def _placement(strategy: CanonicalStrategy, shards: int) -> Callable[[nn.Parameter], Shard] | None:
    if strategy.placement == "dim0":
        return None
    return partial(_largest if strategy.placement == "largest" else _second, shards)


def _second(shards: int, parameter: nn.Parameter) -> Shard:
    even = parameter.dim() > 1 and parameter.shape[1] % shards == 0
    return Shard(int(even))


def _largest(shards: int, parameter: nn.Parameter) -> Shard:
    even = [dim for dim, size in enumerate(parameter.shape) if size % shards == 0]
    return Shard(max(even, key=lambda dim: parameter.shape[dim], default=0))


def gather_ahead(
    root: FSDPModule, units: Sequence[FSDPModule], forward: int, backward: int
) -> None:
    """Let every unit gather the next ones of its direction before it computes."""
    if forward:
        root.set_modules_to_forward_prefetch([*units[:forward]])
    for index, unit in enumerate(units):
        if forward:
            unit.set_modules_to_forward_prefetch([*units[index + 1 : index + 1 + forward]])
        if backward:
            before = units[max(index - backward, 0) : index]
            unit.set_modules_to_backward_prefetch([*reversed(before)])
