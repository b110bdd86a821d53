"""Engine of one strategy in a set of ranks that holds several, and the record of its steps."""

import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardlab.codecs.kernels import native
from shardlab.comm.emulated_link import Emulation, interface_bytes, interface_frames
from shardlab.comm.hierarchy import subgroup
from shardlab.comm.object_collectives import device_of, gather_bytes, gather_values
from shardlab.config.contention import Contention
from shardlab.config.link import connection_name
from shardlab.config.run_record import Breakdown
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.core.files import temporary
from shardlab.core.host import describe_host, git_revision
from shardlab.data.loader import Batches
from shardlab.data.tokens import TokenSplit
from shardlab.engines.base import Optimization
from shardlab.engines.build import build_engine
from shardlab.engines.step_space import refuse_too_large
from shardlab.models.build import build_model
from shardlab.models.dtypes import uses_fp16
from shardlab.models.units import unit_sizes
from shardlab.profiling.breakdown import analyse
from shardlab.train.divergence import has_diverged
from shardlab.train.launch_environment import node_count
from shardlab.train.loop import Loop, StepEvent, traced_steps, write_trace_of
from shardlab.train.summary import mean_ledger
from shardlab.train.timing_plan import TimingPlan

_SEED = 0
_LOSSES = 10
"""steps whose losses are kept: enough to tell numerics apart"""


class Runner:
    """Engine of one run on this rank, with the times, traffic and losses of its steps."""

    def __init__(
        self,
        plan: TimingPlan,
        run: str,
        split: TokenSplit,
        link: Emulation,
        group: dist.ProcessGroup,
    ) -> None:
        self.run, self._group, self._train = run, group, plan.train
        self._plan, self._link = plan, link
        self.strategy = plan.runs[run]
        self._device = device_of(group)
        self._loss_scaled = uses_fp16(self.strategy.canonical(), self._device)
        model, weights = build_model(
            plan.model, split.vocabulary, plan.train.sequence_length, split.end_of_text, _SEED
        )
        refuse_too_large(model, self.strategy, plan.train, self._device, group)
        # read before the engine wraps the model and shards its parameters
        self._parameters = sum(p.numel() for p in model.parameters())
        self._units = unit_sizes(model, self.strategy.canonical(), self._device)
        self._engine = build_engine(
            model,
            self.strategy,
            Optimization(
                plan.train.weight_decay,
                plan.train.clip,
                accumulation=self.strategy.accumulation or plan.train.accumulation,
            ),
            group if run != NO_COMMUNICATION else subgroup(group, [dist.get_rank(group)]),
            _SEED,
            weights,
            self._device,
            link.throttle,
        )
        batches = Batches(split, plan.train.sequence_length, _SEED)
        self._loop = Loop(self._engine, batches, plan.train, group, self.strategy.accumulation)
        self._events: list[StepEvent] = []
        self.active = True
        """whether it takes part in the next repetitions"""
        self.begin()

    def begin(self) -> None:
        """Discard the times and the traffic of the steps so far."""
        self.step_ms: list[float] = []
        self._sent: list[tuple[int, int]] = []
        self._engine.ledger.reset()

    def step(self) -> None:
        """Do one step, which all ranks begin together after the step before."""
        dist.barrier(self._group)
        before = _counters()
        start = perf_counter()
        self._loop.run(1, after=self._events.append)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.step_ms.append((perf_counter() - start) * 1e3)
        dist.barrier(self._group)  # every message has arrived, so the counters include it
        if before is not None and (after := _counters()) is not None:
            self._sent.append((after[0] - before[0], after[1] - before[1]))

    @property
    def diverged(self) -> bool:
        """Return whether no update will succeed any more; alike on all ranks."""
        return has_diverged(self._events, self._loss_scaled)

    def losses(self) -> list[float]:
        """Return the mean losses over the ranks of the first steps, on every rank."""
        ranks = gather_values([event.loss for event in self._events[:_LOSSES]], self._group)
        return [statistics.fmean(step) for step in zip(*ranks, strict=True)]

    def timed_run(self, used: Contention | None) -> TimedRun | None:
        """Trace a few more steps; return the record of those since `begin`, on rank 0.

        Args:
            used: by others during the steps of all runs.
        """
        mine = {
            "step_ms": self.step_ms,
            "sent": self._sent,
            "ledger": self._engine.ledger.summary(),
        }
        ranks = gather_values(mine, self._group)
        breakdown = self._breakdown()
        return None if breakdown is None else self._record(used, ranks, breakdown)

    def _breakdown(self) -> Breakdown | None:
        dist.barrier(self._group)
        traces = gather_bytes(traced_steps(self._loop, self._train.profiled_steps), self._group)
        if dist.get_rank(self._group) != 0:
            return None
        with temporary("shardlab-trace") as folder:
            path = Path(folder, "trace.json.gz")
            write_trace_of(traces, path)
            return analyse(path)

    def _record(
        self, used: Contention | None, ranks: list[dict[str, Any]], breakdown: Breakdown
    ) -> TimedRun:
        plan, train = self._plan, self._train
        link = plan.timing.link
        ledger = mean_ledger([rank["ledger"] for rank in ranks], len(self.step_ms))
        sent = np.array([rank["sent"] for rank in ranks]).reshape(-1, 2)
        nbytes, frames = sent.mean(axis=0).tolist() if sent.size else (None, None)
        strategy = None if self.run == NO_COMMUNICATION else self.strategy
        return TimedRun(
            timing=plan.name,
            run=self.run,
            strategy=None if strategy is None else strategy.canonical().model_dump(mode="json"),
            strategy_hash=None if strategy is None else strategy.hash(),
            model=plan.model.name,
            parameters=self._parameters,
            units=self._units,
            world_size=plan.timing.world_size,
            threads=train.threads,
            batch_size=train.batch_size,
            accumulation=train.accumulation,
            sequence_length=train.sequence_length,
            link=connection_name(link, node_count(plan.timing.world_size)),
            link_emulation=self._link.kind,
            bits_per_second=None if link is None else link.bits_per_second,
            delay_ms=0.0 if link is None else link.delay_ms,
            step_ms=slowest([rank["step_ms"] for rank in ranks]),
            contention=used,
            bytes_raw=sum(kind["bytes_raw"] for kind in ledger.values()),
            bytes_wire=sum(kind["bytes_wire"] for kind in ledger.values()),
            interface_bytes=nbytes,
            interface_frames=frames,
            ledger=ledger,
            breakdown=breakdown,
            revision=git_revision(),
            torch=torch.__version__,
            host=describe_host(),
            kernels=native.serving(),
        )


def slowest(ranks: list[list[float]]) -> list[float]:
    """Return the times of the slowest rank, step by step."""
    return [max(step) for step in zip(*ranks, strict=True)]


def _counters() -> tuple[int, int] | None:
    """Return bytes and frames that this rank has sent over its link; None without one."""
    nbytes, frames = interface_bytes(), interface_frames()
    return None if nbytes is None or frames is None else (nbytes, frames)
