"""Interleaved steps of several strategies in the processes of one set of ranks.

The speed of a machine drifts by more than strategies differ. So each rank holds an engine for every
strategy, and in each repetition each engine does one step, in another order every time: steps of
one repetition are compared in pairs.
"""

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardlab.comm.hierarchy import subgroup
from shardlab.core.progress import say, track
from shardlab.data.tokens.loader import Batches
from shardlab.data.tokens.tokens import TokenSplit, open_split
from shardlab.emulation.link import Emulation, emulated, interface_bytes, interface_frames
from shardlab.engines.build import build_engine
from shardlab.engines.common.base import Optimization
from shardlab.engines.common.units import unit_sizes
from shardlab.environment.host import describe_host, git_revision
from shardlab.experiment.link import LOOPBACK
from shardlab.experiment.schema import Model, Timing, Train
from shardlab.kernels import native
from shardlab.launch import launch
from shardlab.loop.loop import Loop, traced_steps, write_trace_of
from shardlab.loop.summary import mean_ledger
from shardlab.models.build import build_model
from shardlab.profiling.analysis.breakdown import analyse
from shardlab.records.run import Breakdown, LinkEmulation
from shardlab.records.timing import NO_COMMUNICATION, TimedRun, write_timings
from shardlab.strategy.strategy import Strategy
from shardlab.transport.object_collectives import device_of, gather_bytes, gather_values
from shardlab.transport.traffic import LinkThrottle

_SEED = 0
_UNTIMED_REPETITIONS = 2
"""first steps allocate memory, and DDP rebuilds its buckets after one"""


@dataclass(frozen=True)
class TimingPlan:
    """One timing: strategies, ranks and link, model and data."""

    name: str
    timing: Timing
    strategies: dict[str, Strategy]
    """at least those of the timing, by name"""
    train: Train
    """of the steps; ranks and link are the timing's"""
    model: Model
    data: Path = field(default=Path("data"))
    """folder with tokens/"""

    @property
    def runs(self) -> dict[str, Strategy]:
        """Strategies by name; the last is `NO_COMMUNICATION`."""
        named = {run: self.strategies[run] for run in self.timing.runs}
        return {**named, NO_COMMUNICATION: Strategy(engine="ddp")}


def time_strategies(plan: TimingPlan, output: Path) -> None:
    """Write a `TimedRun` of every run of the plan, in their order.

    Raises:
        RunFailed: a rank failed; `output` is as it was.
        UserError: the data, the model or the link cannot be used.
    """
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    ranks, train = plan.timing.world_size, plan.train
    with emulated(plan.timing.link, ranks) as link:
        worker = partial(_work, plan, link, output)
        launch(
            worker,
            ranks,
            train.threads,
            train.timeout_s,
            links=link.links,
            placement=train.placement,
        )


def order(number: int, count: int) -> list[int]:
    """Return the order of the runs in a repetition: the same on all ranks."""
    shuffled = list(range(count))
    random.Random(number).shuffle(shuffled)
    return shuffled


def _work(plan: TimingPlan, link: Emulation, output: Path, group: dist.ProcessGroup) -> None:
    split = open_split(plan.data / "tokens", "train")
    runners = [_Runner(plan, run, split, link.throttle, group) for run in plan.runs]
    for _ in range(_UNTIMED_REPETITIONS):
        for runner in runners:
            runner.step()
    for runner in runners:
        runner.begin()
    repetitions = range(plan.timing.repetitions)
    chief = dist.get_rank(group) == 0
    for number in (
        track(repetitions, f"time {plan.name}", unit="repetition") if chief else repetitions
    ):
        for index in order(number, len(runners)):
            runners[index].step()
    timed = []
    for runner in runners:
        measured, breakdown = runner.measured(), runner.breakdown()
        if chief:
            assert breakdown is not None, "rank 0 has it"
            timed.append(_timed_run(plan, runner, link.kind, measured, breakdown))
    if chief:
        write_timings(output, timed)
        say(f"{plan.name}: {len(timed)} runs of {plan.timing.repetitions} repetitions")


class _Runner:
    """Engine of one run on this rank, with the times and traffic of its steps."""

    def __init__(
        self,
        plan: TimingPlan,
        run: str,
        split: TokenSplit,
        throttle: LinkThrottle | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.run, self._group, self._train = run, group, plan.train
        self.strategy = plan.runs[run]
        self._device = device_of(group)
        model, weights = build_model(
            plan.model, split.vocabulary, plan.train.sequence_length, split.end_of_text, _SEED
        )
        # read before the engine wraps the model and shards its parameters
        self.parameters = sum(p.numel() for p in model.parameters())
        self.units = unit_sizes(model, self.strategy.canonical(), self._device)
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
            throttle,
        )
        batches = Batches(split, plan.train.sequence_length, _SEED)
        self._loop = Loop(self._engine, batches, plan.train, group, self.strategy.accumulation)
        self.begin()

    def begin(self) -> None:
        """Discard the steps so far."""
        self._step_ms: list[float] = []
        self._sent: list[tuple[int, int]] = []
        self._engine.ledger.reset()

    def step(self) -> None:
        """Do one step, which all ranks begin together after the step before."""
        dist.barrier(self._group)
        before = _counters()
        start = perf_counter()
        self._loop.run(1)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._step_ms.append((perf_counter() - start) * 1e3)
        dist.barrier(self._group)  # every message has arrived, so the counters include it
        if before is not None and (after := _counters()) is not None:
            self._sent.append((after[0] - before[0], after[1] - before[1]))

    def measured(self) -> list[dict[str, Any]]:
        """Return the measurements of each rank since `begin`, on every rank."""
        mine = {
            "step_ms": self._step_ms,
            "sent": self._sent,
            "ledger": self._engine.ledger.summary(),
        }
        return gather_values(mine, self._group)

    def breakdown(self) -> Breakdown | None:
        """Trace a few more steps; return their breakdown on rank 0."""
        dist.barrier(self._group)
        traces = gather_bytes(traced_steps(self._loop, self._train.profiled_steps), self._group)
        if dist.get_rank(self._group) != 0:
            return None
        with TemporaryDirectory(prefix="shardlab-trace-") as folder:
            path = Path(folder, "trace.json.gz")
            write_trace_of(traces, path)
            return analyse(path)


def _timed_run(
    plan: TimingPlan,
    runner: _Runner,
    emulation: LinkEmulation,
    ranks: list[dict[str, Any]],
    breakdown: Breakdown,
) -> TimedRun:
    timing, train, link = plan.timing, plan.train, plan.timing.link
    ledger = mean_ledger([rank["ledger"] for rank in ranks], timing.repetitions)
    sent = np.array([rank["sent"] for rank in ranks]).reshape(-1, 2)
    nbytes, frames = sent.mean(axis=0).tolist() if sent.size else (None, None)
    strategy = None if runner.run == NO_COMMUNICATION else runner.strategy
    return TimedRun(
        timing=plan.name,
        run=runner.run,
        strategy=None if strategy is None else strategy.canonical().model_dump(mode="json"),
        strategy_hash=None if strategy is None else strategy.hash(),
        model=plan.model.name,
        parameters=runner.parameters,
        units=runner.units,
        world_size=timing.world_size,
        threads=train.threads,
        batch_size=train.batch_size,
        accumulation=train.accumulation,
        sequence_length=train.sequence_length,
        link=LOOPBACK if link is None else link.name,
        link_emulation=emulation,
        bits_per_second=None if link is None else link.bits_per_second,
        delay_ms=0.0 if link is None else link.delay_ms,
        step_ms=[max(step) for step in zip(*(rank["step_ms"] for rank in ranks), strict=True)],
        bytes_raw=sum(kind["bytes_raw"] for kind in ledger.values()),
        bytes_wire=sum(kind["bytes_wire"] for kind in ledger.values()),
        interface_bytes=nbytes,
        interface_frames=frames,
        ledger=ledger,
        breakdown=breakdown,
        revision=git_revision(),
        torch=torch.__version__,
        host=describe_host(),
    )


def _counters() -> tuple[int, int] | None:
    """Return bytes and frames that this rank has sent over its link; None without one."""
    nbytes, frames = interface_bytes(), interface_frames()
    return None if nbytes is None or frames is None else (nbytes, frames)
