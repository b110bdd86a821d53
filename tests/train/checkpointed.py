"""Runs of a few steps with checkpoints, inside of one set of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.data.loader import Batches
from shardlab.data.tokens import open_split
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.models.settings import Model
from shardlab.strategy.document import parse_strategy
from shardlab.train.checkpoints import Checkpoints, gather_full
from shardlab.train.loop import Loop, StepEvent
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Checkpoint, Train
from tests.drawn_weights import drawn_model

INT4 = {"codec": "int4:group=64", "error_feedback": True}
FORMATS = {
    "full": {"format": "full"},
    "sharded": {"format": "sharded"},
    "asynchronous": {"format": "sharded", "asynchronous": True},
}
SAMPLES = 12
"""of a step, at every number of ranks"""


def strategy_of(engine: str, **gradients: Any) -> dict[str, Any]:
    return {"engine": engine, "gradients": gradients} if gradients else {"engine": engine}


def plan_of(
    data: Path,
    strategy: Mapping[str, Any],
    world_size: int = 2,
    dropout: float = 0.0,
    **train: Any,
) -> RunPlan:
    options = {"steps": 5, "untimed_steps": 1, "warmup_steps": 1, "sequence_length": 16} | train
    batch = SAMPLES // world_size
    return RunPlan(
        "a-run",
        1,
        parse_strategy(dict(strategy)),
        Train(world_size=world_size, batch_size=batch, **options),
        Model(preset="tiny", dropout=dropout),
        data,
    )


@dataclass
class Run:
    """One run on this rank, before its first step or after what it continues from."""

    engine: Engine
    loop: Loop
    checkpoints: Checkpoints
    events: list[StepEvent]

    @classmethod
    def start(cls, plan: RunPlan, root: Path, group: dist.ProcessGroup, **options: Any) -> "Run":
        split = open_split(plan.data / "tokens", "train")
        length = plan.train.sequence_length
        built = drawn_model(plan.model, split.vocabulary, length, split.end_of_text, plan.seed)
        model, weights = built
        shared = ("optimizer", "weight_decay", "clip", "betas")
        optimization = Optimization(**{key: getattr(plan.train, key) for key in shared})
        engine = build_engine(model, plan.strategy, optimization, group, plan.seed, weights)
        batches = Batches(split, plan.train.sequence_length, plan.seed)
        drawn = plan.seed if plan.model.dropout else None
        loop = Loop(engine, batches, plan.train, group, plan.train.accumulation, drawn)
        options = {"every": 1000} | options
        checkpoints = Checkpoints(plan, Checkpoint(**options), root, engine, loop, group)
        return cls(engine, loop, checkpoints, checkpoints.resume())

    def to(self, step: int) -> "Run":
        """Goes on until so many steps are done."""

        def after(event: StepEvent) -> None:
            self.events.append(event)
            self.checkpoints.step_done(self.events)

        self.loop.run(step - self.loop.step, after)
        self.checkpoints.wait()
        return self

    def curve(self) -> torch.Tensor:
        """Values that must not depend on an interruption, [steps, 3] in float64."""
        rows = [(e.loss, e.gradient_norm, e.learning_rate) for e in self.events]
        return torch.tensor(rows, dtype=torch.float64)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that training works on, as this rank holds it."""
        state = {**self.engine.shards(), **self.engine.rank_state()}
        found = {f"{kind}.{name}": t for kind, named in state.items() for name, t in named.items()}
        return {key: getattr(t, "to_local", lambda t=t: t)().clone() for key, t in found.items()}

    def whole(self) -> dict[str, torch.Tensor]:
        """Parameters and moments of all ranks, on rank 0."""
        state = gather_full(self.engine, dist.get_rank() == 0)
        return {f"{kind}.{name}": t for kind, named in state.items() for name, t in named.items()}


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names under which the two do not hold the same bits."""
    return [k for k in {**one, **other} if k not in one or not torch.equal(one[k], other[k])]
