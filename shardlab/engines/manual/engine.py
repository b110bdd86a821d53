"""`manual`: our own sharding, with communication beside computation on every device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardlab.core.strategy import Strategy
from shardlab.engines.base import AutogradEngine, Optimization
from shardlab.engines.manual.model import FlatSharded
from shardlab.models.build import transformer_blocks


class ManualEngine(AutogradEngine):
    """Every rank holds 1/W of one flat vector per unit, and of its gradient and optimizer state."""

    def __init__(
        self,
        model: nn.Module,
        strategy: Strategy,
        optimization: Optimization,
        group: dist.ProcessGroup,
        seed: int = 0,
    ) -> None:
        full = strategy.normal()
        blocks = transformer_blocks(model) if full.wrap == "block" else []
        depth, reshard = full.prefetch or 0, bool(full.reshard_after_forward)
        self._sharded = FlatSharded(model, blocks, group, depth, reshard)
        self._group = group
        super().__init__(self._sharded, full, optimization, seed)

    @contextmanager
    def _without_reduction(self) -> Iterator[None]:
        schedule = self._sharded.schedule
        schedule.reducing = False
        try:
            yield
        finally:
            schedule.reducing = True

    def _finish_backward(self) -> None:
        self._sharded.finish()

    def _clip(self) -> float:
        shards = list(self._sharded.shards)
        own = torch.nn.utils.get_total_norm([s.grad for s in shards if s.grad is not None])
        square = own.double().square()
        dist.all_reduce(square, group=self._group)
        norm = square.sqrt().float()
        limit = self._optimization.clip
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(shards, limit, norm)
        return float(norm)

    def full_parameters(self) -> dict[str, Tensor]:  # noqa: D102
        return self._sharded.full_parameters()

    def split(self, name: str, whole: Tensor) -> dict[str, Tensor]:  # noqa: D102
        return self._sharded.split(name, whole)

    def _trained(self) -> dict[str, nn.Parameter]:
        return self._sharded.shards_by_unit()

    def _laid_out(self, name: str, local: Tensor) -> Tensor:
        return self._sharded.as_dtensor(name, local)
