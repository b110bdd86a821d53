"""`fsdp2`: torch's fully_shard, parameters sharded per unit and gathered for use."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardlab.core.strategy import Strategy
from shardlab.engines.base import AutogradEngine, Optimization
from shardlab.models.build import transformer_blocks


class FSDP2Engine(AutogradEngine):
    """Every rank holds 1/W of each parameter, gradient and optimizer state."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optimization: Optimization,
        group: dist.ProcessGroup,
        seed: int = 0,
    ) -> None:
        full = strategy.normal()
        device = next(model.parameters()).device.type
        mesh = DeviceMesh.from_group(group, device)
        if full.wrap == "block":
            for block in transformer_blocks(model):
                fully_shard(block, mesh=mesh, reshard_after_forward=full.reshard_after_forward)
        # backward begins where forward ended: what the root gathered is needed again at once
        root = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        super().__init__(model, full, optimization, seed)
        self._root: FSDPModule = root
        if full.wrap == "block" and full.prefetch:
            _prefetch(transformer_blocks(model), full.prefetch)

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        self._root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self._root.set_requires_gradient_sync(True)


def _prefetch(blocks: Sequence[nn.Module], depth: int) -> None:
    """Every block gathers the next ones of its direction before it computes."""
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + depth])
        unit.set_modules_to_backward_prefetch(units[max(index - depth, 0) : index][::-1])
