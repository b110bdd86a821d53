"""The training loop: the same for every engine."""

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter

import torch.distributed as dist
from torch import Tensor

from shardlab.core.params import Train
from shardlab.core.progress import track
from shardlab.data.loader import Batches
from shardlab.engines.base import Engine
from shardlab.train.schedule import learning_rate
from shardlab.train.telemetry import Telemetry


@dataclass(frozen=True)
class StepEvent:
    """One step as one rank saw it."""

    step: int
    loss: float
    step_ms: float
    learning_rate: float
    gradient_norm: float
    applied: bool


class Loop:
    """Feeds an engine with batches whose order depends on the seed alone.

    Any number of ranks sees the same samples in the same steps, as long as all together take the
    same number of them in a step.
    """

    def __init__(
        self, engine: Engine, batches: Batches, train: Train, group: dist.ProcessGroup
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._train = train
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._step = 0

    def run(self, steps: int, telemetry: Telemetry | None = None) -> list[StepEvent]:
        """The next `steps` steps, timed from the end of one to the end of the next."""
        numbers: Iterator[int] = iter(range(steps))
        if self._rank == 0:
            numbers = track(range(steps), "train", total=steps, unit="step")
        events = []
        last = perf_counter()
        for _ in numbers:
            rate = learning_rate(
                self._step,
                self._train.steps,
                self._train.learning_rate,
                self._train.warmup_steps,
                self._train.decay,
            )
            outcome = self._engine.step(self._micro_batches(), rate)
            now = perf_counter()
            event = StepEvent(
                self._step,
                outcome.loss,
                (now - last) * 1e3,
                rate,
                outcome.gradient_norm,
                outcome.applied,
            )
            last = now
            self._step += 1
            events.append(event)
            if telemetry is not None:
                telemetry.write(event.step, event.loss, event.step_ms, rate, event.gradient_norm)
        return events

    @property
    def tokens_per_step(self) -> int:
        """Tokens that all ranks together are trained on in one step."""
        train = self._train
        return train.accumulation * self._world_size * train.batch_size * train.sequence_length

    def _micro_batches(self) -> list[Tensor]:
        train = self._train
        return self._batches.micro_batches(
            self._step, self._rank, self._world_size, train.accumulation, train.batch_size
        )
