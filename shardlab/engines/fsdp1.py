"""`fsdp1`: torch's FullyShardedDataParallel, one flat vector per unit."""

import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy

from shardlab.comm.fsdp1_hooks import unit_names, units
from shardlab.core import torch_private
from shardlab.core.errors import UserError
from shardlab.engines.base import EngineSetup, Fill
from shardlab.engines.flat import (
    SHARD,
    FlatEngine,
    FlatVector,
    make_mesh,
    mesh_replica_group,
    mesh_replicas,
)
from shardlab.models.parts import transformer_blocks
from shardlab.models.units import dtype_of
from shardlab.strategy.document import CanonicalStrategy


class FSDP1Engine(FlatEngine):
    """Engine with 1/W of a flat vector per unit, its gradient and optimizer state on each rank.

    Hybrid sharding is made of full sharding over the ranks of one copy and an average over copies
    in the communication hook: torch takes no hook with its own HYBRID_SHARD, so nothing there could
    be compressed or counted, and on CPU without a mesh its copies drift apart
    (`torch/distributed/fsdp/_init_utils.py`: one device makes a shard group of one).
    """

    def __init__(self, model: nn.Module, setup: EngineSetup) -> None:
        strategy = setup.strategy
        self._mesh = make_mesh(setup.group, mesh_replicas(strategy, setup.group), setup.device)
        wrapped = wrap_model(model, strategy, self._mesh, setup.device, setup.fill)
        between = mesh_replica_group(self._mesh)
        super().__init__(wrapped, setup, replicas=between)
        self._wrapped = wrapped
        self._keeps_parameters = strategy.use_orig_params or False
        if wrapped.sharding_strategy is not ShardingStrategy.NO_SHARD:
            self._shards = self._mesh.get_group(SHARD)

    def _accumulating(self) -> AbstractContextManager[None]:
        return self._wrapped.no_sync()

    def whole_parameters(self) -> Iterator[dict[str, Tensor]]:  # noqa: D102
        if not self._keeps_parameters:
            yield from super().whole_parameters()
            return
        names = unit_names(self._wrapped)
        for name, unit in units(self._wrapped).items():
            with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
                if (flat := torch_private.flat_parameter(unit)) is not None:
                    parts = [parameter.detach() for parameter in torch_private.flat_views(flat)]
                    yield dict(zip(names[name], parts, strict=True))

    def replicas(self) -> dict[str, Tensor]:  # noqa: D102
        # uneven parts, which no DTensor describes
        return {} if self._keeps_parameters else super().replicas()

    def _vectors(self) -> dict[str, FlatVector]:
        if self._keeps_parameters:
            raise UserError(
                "fsdp1: with use_orig_params ranks hold uneven parts of parameters, which no "
                "checkpoint describes: remove it, or train.checkpoint"
            )
        names = unit_names(self._wrapped)
        return {
            name: FlatVector(
                flat, dict(zip(names[name], torch_private.flat_shapes(flat), strict=True))
            )
            for name, unit in units(self._wrapped).items()
            if (flat := torch_private.flat_parameter(unit)) is not None
        }

    def _laid_out(self, name: str, local: Tensor) -> Tensor:
        if self._wrapped.sharding_strategy is ShardingStrategy.NO_SHARD:
            return local
        return super()._laid_out(name, local)


def wrap_model(
    model: nn.Module,
    strategy: CanonicalStrategy,
    mesh: DeviceMesh,
    device: torch.device,
    fill: Fill,
) -> FullyShardedDataParallel:
    """Return a model that is sharded by a strategy's canonical form."""
    with warnings.catch_warnings():
        # torch warns of NO_SHARD, which the strategy asks for, or which a single rank implies
        warnings.filterwarnings("ignore", "(?s).*NO_SHARD")
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh[SHARD],
            sharding_strategy=_sharding(strategy),
            auto_wrap_policy=_policy(model, strategy),
            mixed_precision=MixedPrecision(
                param_dtype=dtype_of(strategy.param_dtype, device),
                reduce_dtype=dtype_of(strategy.reduce_dtype, device),
            ),
            device_id=device,
            param_init_fn=fill,
            use_orig_params=strategy.use_orig_params or False,
            limit_all_gathers=strategy.limit_all_gathers is not False,
            cpu_offload=CPUOffload(True) if strategy.offload else None,
            **_prefetch(strategy),
        )


def _sharding(strategy: CanonicalStrategy) -> ShardingStrategy:
    if strategy.sharding == "no_shard":
        return ShardingStrategy.NO_SHARD
    freed = strategy.reshard_after_forward
    return ShardingStrategy.FULL_SHARD if freed else ShardingStrategy.SHARD_GRAD_OP


def _policy(
    model: nn.Module, strategy: CanonicalStrategy
) -> Callable[..., Any] | CustomPolicy | None:
    if strategy.wrap == "root":
        return None
    if strategy.wrap == "size":
        return partial(_by_size, _sharing(model), int(strategy.wrap_size or 0))
    blocks = {*transformer_blocks(model)}
    return CustomPolicy(lambda module: module in blocks)


def _by_size(
    apart: Container[nn.Module], size: int, module: nn.Module, recurse: bool, nonwrapped_numel: int
) -> bool:
    """Apply torch's policy, but not to modules that share a parameter with others."""
    if module in apart:
        return recurse
    return bool(size_based_auto_wrap_policy(module, recurse, nonwrapped_numel, min_num_params=size))


def _sharing(model: nn.Module) -> set[nn.Module]:
    """Return modules with a parameter that the model also has elsewhere."""
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    return {
        module
        for module in model.modules()
        if any(
            uses[parameter] > inside
            for parameter, inside in Counter(
                p for m in module.modules() for p in m.parameters(recurse=False)
            ).items()
        )
    }


def _prefetch(strategy: CanonicalStrategy) -> dict[str, Any]:
    forward, backward = strategy.depths()
    return {
        "forward_prefetch": forward > 0,
        "backward_prefetch": BackwardPrefetch.BACKWARD_PRE if backward else None,
    }
