"""Training loop for any engine: learning-rate schedule, timed and traced steps, divergence."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from shardlab.comm.emulated_link import LinkThrottle, link_counters
from shardlab.comm.object_collectives import device_of, subgroup
from shardlab.core.files import temporary
from shardlab.core.progress import track
from shardlab.data.loader import Batches, first_samples
from shardlab.data.tokens import TokenSplit
from shardlab.engines.base import Engine, Optimization
from shardlab.engines.build import build_engine
from shardlab.models.build import build_model
from shardlab.models.settings import Model
from shardlab.models.units import unit_sizes, uses_fp16
from shardlab.profiling.capture import Capture
from shardlab.profiling.merge import merge_traces
from shardlab.results.result import UnitSize
from shardlab.strategy.document import Strategy
from shardlab.strategy.sync import Sync
from shardlab.train.settings import Train
from shardlab.train.step_space import refuse_too_large
from shardlab.train.utilization import flops_per_token

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
    collective_ms: float | None = None
    """time with a collective under way; None until a device, which nothing waits for, has done the
    step: by the end of a later step, or by `Ledger.wait`"""
    interface_bytes: float | None = None
    """sent over the emulated link of this rank's node; None without one"""
    interface_bytes_inside: float | None = None
    """sent over loopback by the ranks of the node"""
    bytes_wire: float = 0.0
    """in the ledger"""
    residual_norm: float | None = None
    """norm of what error feedback holds back on this rank after the step; None without it, or as
    long as a device has not done the step"""
    clipped_steps: int = 0
    """steps up to this one whose gradient was longer than `train.clip`"""
    skipped_steps: int = 0
    """steps up to this one that were left out, since the gradient was not finite"""
    memory_peak_bytes: int = 0
    """as in a record, until the end of the step"""
    memory_reserved_bytes: int | None = None
    """likewise"""
    val_loss: float | None = None
    """validation loss after the step, on rank 0; None of a step without one"""

    def count(self, before: "StepEvent | None", clip: float | None) -> None:
        """Set the numbers of steps from those of the step before; None: there is none."""
        self.clipped_steps = int(clip is not None and self.gradient_norm > clip)
        self.skipped_steps = int(not self.applied)
        if before is not None:
            self.clipped_steps += before.clipped_steps
            self.skipped_steps += before.skipped_steps


def _set_collective_ms(event: StepEvent, in_collectives_s: float) -> None:
    event.collective_ms = in_collectives_s * 1e3


def _set_residual_norm(event: StepEvent, squares: float) -> None:
    event.residual_norm = math.sqrt(squares)


class Loop:
    """Loop that feeds an engine with batches whose order depends on the seed alone.

    The samples of a step do not depend on the number of ranks, as long as the global batch size is
    the same. What dropout drops depends on the seed and on the first sample of a micro-batch.

    Args:
        accumulation: number of micro-batches of a step.
        dropout_seed: of what dropout drops; None: the model drops nothing.
    """

    def __init__(
        self,
        engine: Engine,
        batches: Batches,
        train: Train,
        group: dist.ProcessGroup,
        accumulation: int,
        dropout_seed: int | None = None,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._train = train
        self._accumulation = accumulation
        self._dropout_seed = dropout_seed
        self._rank = dist.get_rank(group)
        self._world_size = dist.get_world_size(group)
        self._samples = train.step_size(self._world_size).samples
        """of a step on this rank"""
        self._device = device_of(group)
        self.step = 0
        """number of steps done"""
        self.sample = 0
        """index of the next sample"""

    def run(
        self,
        steps: int,
        after: Callable[[StepEvent], bool | None] | None = None,
        residual_norms: bool = False,
    ) -> None:
        """Run the next `steps` steps.

        Args:
            after: called after each step; its time does not count. True ends the run.
            residual_norms: measure that of each step, likewise.
        """
        numbers: Iterator[int] = iter(range(steps))
        if self._rank == 0:
            numbers = track(range(steps), "train", total=steps, unit="step")
        ledger = self._engine.ledger
        traffic = ledger.traffic
        for _ in numbers:
            start, before, known = perf_counter(), link_counters(), ledger.bytes_wire
            traffic.begin_step(self._device)
            event = self._step()
            event.step_ms = (perf_counter() - start) * 1e3
            if before is not None and (after_it := link_counters()) is not None:
                event.interface_bytes = after_it.nbytes - before.nbytes
                event.interface_bytes_inside = after_it.inside - before.inside
            event.bytes_wire = ledger.bytes_wire - known
            traffic.end_step(partial(_set_collective_ms, event))
            squares = self._engine.residual_squares() if residual_norms else None
            if squares is not None:
                ledger.read(squares, partial(_set_residual_norm, event))
            if after is not None and after(event):
                return

    def _step(self) -> StepEvent:
        """Do a step; what is measured around it is not yet in the event."""
        train = self._train
        rate = learning_rate(
            self.step, train.steps, train.learning_rate, train.warmup_steps, train.decay
        )
        outcome = self._engine.step(self.micro_batches(), rate, self._seeds())
        samples = self._world_size * self._samples
        event = StepEvent(
            step=self.step,
            loss=outcome.loss,
            step_ms=math.nan,
            learning_rate=rate,
            gradient_norm=outcome.gradient_norm,
            applied=outcome.applied,
            tokens=samples * train.sequence_length,
        )
        self.step += 1
        self.sample += samples
        return event

    def micro_batches(self) -> list[Tensor]:
        """Return the micro-batches of the next step on this rank."""
        return self._batches.micro_batches(*self._position())

    def _seeds(self) -> list[int] | None:
        """Return a seed of dropout for each micro-batch of the next step; None without dropout."""
        if self._dropout_seed is None:
            return None
        texts = [f"{self._dropout_seed}/{first}" for first in first_samples(*self._position())]
        digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
        return [int.from_bytes(digest, "big") for digest in digests]

    def _position(self) -> tuple[int, int, int, int, int]:
        """Return the arguments of `Batches.micro_batches`."""
        size = self._samples // self._accumulation
        return self.sample, self._rank, self._world_size, self._accumulation, size


class BuiltLoop(NamedTuple):
    """Model, engine and loop of one strategy on this rank."""

    model: PreTrainedModel
    """wrapped by the engine"""
    engine: Engine
    loop: Loop
    parameters: int
    """of the whole model"""
    units: list[UnitSize]
    """of the parts that the strategy wraps"""
    flops_per_token: float
    loss_scaled: bool
    """whether fp16 scales the loss"""


def build_loop(
    model: Model,
    strategy: Strategy,
    train: Train,
    split: TokenSplit,
    seed: int,
    throttle: LinkThrottle | None,
    group: dist.ProcessGroup,
    alone: bool = False,
) -> BuiltLoop:
    """Build the model, the engine of a strategy and its loop, on all ranks together.

    Args:
        throttle: of an emulated link.
        alone: without communication: each rank trains a replica of its own.

    Raises:
        UserError: the ranks lack memory for it.
    """
    device = device_of(group)
    whole, weights = build_model(
        model, split.vocabulary, train.sequence_length, split.end_of_text, seed
    )
    step = train.step_size(dist.get_world_size(group))
    refuse_too_large(whole, strategy, step, device, group)
    # read before the engine wraps the model and shards its parameters
    parameters = sum(p.numel() for p in whole.parameters())
    units = unit_sizes(whole, strategy.canonical(), device)
    flops = flops_per_token(whole, train.sequence_length)
    accumulation = strategy.accumulation or train.accumulation
    strategy = strategy.model_copy(update={"accumulation": accumulation})
    optimization = Optimization(
        optimizer=train.optimizer,
        weight_decay=train.weight_decay,
        clip=train.clip,
        betas=train.betas,
    )
    ranks = subgroup(group, [dist.get_rank(group)]) if alone else group
    engine = build_engine(whole, strategy, optimization, ranks, seed, weights, device, throttle)
    batches = Batches(split, train.sequence_length, seed)
    drawn = seed if model.dropout else None
    loop = Loop(engine, batches, train, group, accumulation, drawn)
    scaled = uses_fp16(strategy.canonical(), device)
    return BuiltLoop(whole, engine, loop, parameters, units, flops, scaled)


_PATIENCE = 3
"""steps in a row without an update: one alone may be a bad batch"""
_HALVINGS = 16
"""more, while the loss scale of fp16 goes from 2**16 to 1"""


def has_diverged(events: Sequence[StepEvent], loss_scaled: bool) -> bool:
    """Return whether so many last steps were left out that none will succeed; alike on all ranks.

    Args:
        loss_scaled: whether fp16 scales the loss.
    """
    patience = _PATIENCE + (_HALVINGS if loss_scaled else 0)
    return len(events) >= patience and not any(event.applied for event in events[-patience:])


def divergence_step(events: Sequence[dict[str, Any]], steps: int) -> int | None:
    """Return the first of the last steps without finite loss and gradient; None if it recovered.

    Args:
        events: of the steps that ran, merged over ranks.
        steps: that were to run.
    """
    if len(events) == steps and _is_finite(events[-1]):
        return None
    good = (n for n, event in enumerate(events) if event["applied"] and _is_finite(event))
    return int(events[max(good, default=-1) + 1]["step"])


def _is_finite(event: dict[str, Any]) -> bool:
    return math.isfinite(event["loss"])


def traced_steps(loop: Loop, steps: int, sync: Sync | None) -> bytes:
    """Return the trace of this rank's next steps, after one that warms the profiler up.

    Args:
        steps: at least so many; with rare exchanges whole rounds, whose mean is that of the run.
    """
    if sync is not None:
        steps = sync.whole_rounds(steps) or steps
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
