"""Training loop for any engine, with its learning-rate schedule and traced steps."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

from shardlab.comm.emulated_link import interface_bytes
from shardlab.comm.object_collectives import device_of
from shardlab.config.schema import Train
from shardlab.core.files import temporary
from shardlab.core.progress import track
from shardlab.data.loader import Batches
from shardlab.engines.base import Engine
from shardlab.profiling.capture import Capture
from shardlab.profiling.merge import merge_traces

_FLOOR = 0.1
"""fraction of the peak learning rate at the end of the cosine (Hoffmann et al. 2022, section B)"""


def learning_rate(
    step: int,
    steps: int,
    peak: float,
    warmup_steps: int,
    decay: Literal["cosine", "constant"] = "cosine",
) -> float:
    """Return the rate of a step: linear warm-up to `peak`, then cosine decay to a tenth, or `peak`.

    Args:
        step: counted from 0; steps beyond `steps` keep the last value.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if decay == "constant":
        return peak
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass
class StepEvent:
    """Measurements of one step on one rank; on a device, one of them is known later."""

    step: int
    loss: float
    step_ms: float
    learning_rate: float
    gradient_norm: float
    applied: bool
    tokens: int
    """of all ranks"""
    collective_ms: float | None
    """time with a collective under way; None until a device, which nothing waits for, has done the
    step: by the end of a later step, or by `Ledger.settle`"""
    interface_bytes: float | None
    """sent by the interface of this rank's emulated link; None without one"""


class _Moment(NamedTuple):
    """Readings at the beginning of a step."""

    seconds: float
    interface_bytes: int | None


class Loop:
    """Loop that feeds an engine with batches whose order depends on the seed alone.

    The samples of a step do not depend on the number of ranks, as long as the global batch size is
    the same.

    Args:
        accumulation: number of micro-batches of a step; None: as `train` says.
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
        self._device = device_of(group)
        self.step = 0
        """number of steps done"""
        self.sample = 0
        """index of the next sample"""

    def run(self, steps: int, after: Callable[[StepEvent], bool | None] | None = None) -> None:
        """Run the next `steps` steps, each timed from the end of the one before.

        Args:
            after: called after each step; its time does not count. True ends the run.
        """
        numbers: Iterator[int] = iter(range(steps))
        if self._rank == 0:
            numbers = track(range(steps), "train", total=steps, unit="step")
        start = self._begin()
        for _ in numbers:
            event = self._next(start)
            if after is not None and after(event):
                return
            start = self._begin()

    def _begin(self) -> _Moment:
        start = perf_counter()
        self._engine.ledger.traffic.begin_step(self._device)
        return _Moment(start, interface_bytes())

    def _next(self, start: _Moment) -> StepEvent:
        train = self._train
        rate = learning_rate(
            self.step, train.steps, train.learning_rate, train.warmup_steps, train.decay
        )
        outcome = self._engine.step(self.micro_batches(), rate)
        end, sent, before = perf_counter(), interface_bytes(), start.interface_bytes
        samples = train.accumulation * self._world_size * train.batch_size
        event = StepEvent(
            self.step,
            outcome.loss,
            (end - start.seconds) * 1e3,
            rate,
            outcome.gradient_norm,
            outcome.applied,
            samples * train.sequence_length,
            None,
            None if sent is None or before is None else sent - before,
        )

        def know(in_collectives_s: float) -> None:
            event.collective_ms = in_collectives_s * 1e3

        self._engine.ledger.traffic.end_step(know)
        self.step += 1
        self.sample += samples
        return event

    def micro_batches(self) -> list[Tensor]:
        """Return the micro-batches of the next step on this rank."""
        size, count = self._train.batch_size, self._train.accumulation
        if self._accumulation is not None:
            count, size = self._accumulation, size * count // self._accumulation
        return self._batches.micro_batches(self.sample, self._rank, self._world_size, count, size)


def traced_steps(loop: Loop, steps: int) -> bytes:
    """Return the trace of this rank's next steps, after one that warms the profiler up."""
    with temporary("shardlab-trace") as folder:
        path = Path(folder, "trace.json.gz")
        with Capture(steps) as capture:
            for _ in range(capture.calls):
                loop.run(1)
                capture.step()
        capture.export(path)
        return path.read_bytes()


def write_trace_of(ranks: Sequence[bytes], output: Path) -> None:
    """Merge what `traced_steps` returned on each rank, in rank order, into one file."""
    with temporary("shardlab-traces") as folder:
        paths = []
        for rank, content in enumerate(ranks):
            paths.append(Path(folder, f"rank{rank}.json.gz"))
            paths[-1].write_bytes(content)
        merge_traces(paths, output)
