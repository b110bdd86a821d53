"""A real engine on random tokens, and traces of its steps."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab.config.model_and_data import Model
from shardlab.config.strategy import Strategy
from shardlab.core.document import validate
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.profiling.capture import Capture
from shardlab.train.launch import launch

_VOCABULARY, _LENGTH, _SAMPLES = 2048, 64, 8
_UNTIMED = 3
_LONGEST_WAIT_S = 1800.0


class Trainee:
    """One rank's engine of a model with random weights, after its first steps."""

    def __init__(self, strategy: Strategy, preset: str, group: dist.ProcessGroup) -> None:
        chosen = validate(Model, {"preset": preset}, "--preset")
        model = build_model(chosen, _VOCABULARY, _LENGTH, 0, seed=1).whole()
        self._tokens = torch.Generator().manual_seed(dist.get_rank(group))
        optimization = Optimization(weight_decay=0.1, clip=1.0)
        self.engine: Engine = build_engine(model, strategy, optimization, group)
        for _ in range(_UNTIMED):
            self.step()

    def step(self) -> None:
        """Train one step on new samples."""
        size = (_SAMPLES, _LENGTH + 1)
        self.engine.step([torch.randint(_VOCABULARY, size, generator=self._tokens)], 1e-3)


def trace(strategy: Strategy, preset: str, world_size: int, steps: int, folder: Path) -> list[Path]:
    """Trace some steps of a run; return one uncompressed file per rank, in rank order."""
    launch(partial(_trace, strategy, preset, steps, folder), world_size, 1, _LONGEST_WAIT_S)
    return [folder / f"rank{rank}.json" for rank in range(world_size)]


def _trace(
    strategy: Strategy, preset: str, steps: int, folder: Path, group: dist.ProcessGroup
) -> None:
    trainee = Trainee(strategy, preset, group)
    with Capture(steps) as capture:
        for _ in range(capture.calls):
            trainee.step()
            capture.step()
    capture.export(folder / f"rank{dist.get_rank(group)}.json")
