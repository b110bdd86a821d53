"""The `manual` engine: our own sharding, whose communication overlaps on every device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn

from shardlab.engines.common.flat import FlatEngine, FlatVector
from shardlab.engines.common.mesh import SHARD, make_mesh, mesh_copies
from shardlab.engines.common.precision import dtype_of
from shardlab.engines.common.setup import EngineSetup
from shardlab.engines.common.units import plan_units
from shardlab.engines.manual.model import FlatSharded
from shardlab.engines.manual.schedule import Reduced


class ManualEngine(FlatEngine):
    """Engine with 1/W of a flat vector per unit, its gradient and optimizer state on each rank."""

    def __init__(self, model: nn.Module, setup: EngineSetup) -> None:
        strategy, device = setup.strategy, setup.device
        self._mesh = make_mesh(setup.group, mesh_copies(strategy, setup.group), device)
        self._sharded = FlatSharded(
            model,
            setup.fill,
            plan_units(model, strategy, device),
            self._mesh,
            strategy.depths(),
            dtype_of(strategy.param_dtype, device),
            dtype_of(strategy.reduce_dtype, device),
        )
        self._early: Reduced = "shards" if strategy.reduce_every_micro_batch else "nothing"
        super().__init__(self._sharded, setup)

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        schedule = self._sharded.schedule
        schedule.reducing = self._early
        try:
            yield
        finally:
            schedule.reducing = "all"

    def _finish_backward(self) -> None:
        self._sharded.finish()

    def _sum_over_shards(self, squares: Tensor) -> Tensor:
        dist.all_reduce(squares, group=self._mesh.get_group(SHARD))
        return squares

    def _vectors(self) -> dict[str, FlatVector]:
        return {unit.name: FlatVector(unit.shard, unit.shapes) for unit in self._sharded.units}
