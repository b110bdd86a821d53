"""The training loop: the same for every engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardlab.core.progress import track
from shardlab.data.tokens.loader import Batches
from shardlab.emulation.link import interface_bytes
from shardlab.engines.common.base import Engine
from shardlab.experiment.schema import Train
from shardlab.loop.schedule import learning_rate
from shardlab.transport.object_collectives import device_of


@dataclass(frozen=True)
class StepEvent:
    """One step as one rank saw it."""

    step: int
    loss: float
    step_ms: float
    learning_rate: float
    gradient_norm: float
    applied: bool
    tokens: int
    """that all ranks together were trained on"""
    collective_ms: float | None
    """with a collective or more under way; None on devices, which the CPU does not wait for"""
    interface_bytes: float | None
    """that the interface of this rank's own emulated link sent; None without one"""


class _Moment(NamedTuple):
    """What is read where a step begins and where it ends."""

    seconds: float
    in_collectives_s: float
    interface_bytes: int | None


class Loop:
    """Feeds an engine with batches whose order depends on the seed alone.

    Any number of ranks sees the same samples in the same steps, as long as all together take the
    same number of them in a step.

    Args:
        accumulation: micro-batches that a rank's samples of a step are cut into, if not as `train`
            says.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        train: Train,
        group: dist.ProcessGroup,
        accumulation: int | None = None,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._train = train
        self._accumulation = accumulation
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._waits = device_of(group).type == "cpu"
        self.step = 0
        """how many are done"""
        self.sample = 0
        """the first one that no step has seen"""

    def run(self, steps: int, after: Callable[[StepEvent], None] | None = None) -> None:
        """The next `steps` steps, each timed from the end of the one before.

        Args:
            after: called after each step; its time is no step's.
        """
        numbers: Iterator[int] = iter(range(steps))
        if self._rank == 0:
            numbers = track(range(steps), "train", total=steps, unit="step")
        start = self._now()
        for _ in numbers:
            event = self._next(start)
            if after is not None:
                after(event)
            start = self._now()

    def _now(self) -> _Moment:
        return _Moment(perf_counter(), self._engine.ledger.traffic.seconds, interface_bytes())

    def _next(self, start: _Moment) -> StepEvent:
        train = self._train
        rate = learning_rate(
            self.step, train.steps, train.learning_rate, train.warmup_steps, train.decay
        )
        outcome = self._engine.step(self.micro_batches(), rate)
        end = self._now()
        communicating_ms = (end.in_collectives_s - start.in_collectives_s) * 1e3
        sent, before = end.interface_bytes, start.interface_bytes
        samples = train.accumulation * self._world_size * train.batch_size
        event = StepEvent(
            self.step,
            outcome.loss,
            (end.seconds - start.seconds) * 1e3,
            rate,
            outcome.gradient_norm,
            outcome.applied,
            samples * train.sequence_length,
            communicating_ms if self._waits else None,
            None if sent is None or before is None else sent - before,
        )
        self.step += 1
        self.sample += samples
        return event

    def micro_batches(self) -> list[Tensor]:
        """Of the next step, on this rank."""
        size, count = self._train.batch_size, self._train.accumulation
        if self._accumulation is not None:
            count, size = self._accumulation, size * count // self._accumulation
        return self._batches.micro_batches(self.sample, self._rank, self._world_size, count, size)
