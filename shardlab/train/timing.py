"""One run of a timing: its engine on this rank, and the times, traffic and losses of its steps."""

import statistics
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardlab.comm.emulated_link import Emulation, LinkCounters, link_counters
from shardlab.comm.object_collectives import device_of, gather_values
from shardlab.core.files import temporary
from shardlab.data.tokens import TokenSplit
from shardlab.profiling.breakdown import analyse
from shardlab.results.contention import Contention
from shardlab.results.result import Breakdown
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.train.header import header
from shardlab.train.loop import StepEvent, build_loop, has_diverged, traced_steps, write_trace_of
from shardlab.train.plans import TimingPlan
from shardlab.train.summary import mean_ledger

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
        self.run, self.strategy = run, plan.runs[run]
        self._plan, self._link, self._group = plan, link, group
        alone, sync = run == NO_COMMUNICATION, self.strategy.sync
        # steps of a warm-up are those of another strategy
        timed = self.strategy.after_warmup()
        self._round = plan.steps_of(run)
        """steps of a repetition"""
        self._built = build_loop(
            plan.model, timed, plan.samples, split, _SEED, link.throttle, group, alone
        )
        self._events: list[StepEvent] = []
        self.active = True
        """whether it takes part in the next repetitions"""
        if sync is not None:
            # a round ends where the exchange of the first fragment does: with the delay of a later
            # one a repetition would hide it, and the steps of other runs would share the link
            self._built.loop.run(sync.delay, after=self._events.append)
        self.begin()

    def begin(self) -> None:
        """Discard the times and the traffic of the steps so far."""
        self.step_ms: list[float] = []
        self._sent: list[list[float]] = []
        """by `LinkCounters`, per step"""
        self._built.engine.ledger.reset()

    def step(self) -> None:
        """Do one step, which all ranks begin together after the step before; where copies train
        alone a round, with one exchange of every fragment, whose mean step counts."""
        before = link_counters()  # first: other ranks of the node may send after the barrier
        dist.barrier(self._group)
        start = perf_counter()
        self._built.loop.run(self._round, after=self._events.append)
        # fragments and updates that are still under way may use no time of other runs
        self._built.engine.wait()
        if device_of(self._group).type == "cuda":
            torch.cuda.synchronize()
        self.step_ms.append((perf_counter() - start) * 1e3 / self._round)
        dist.barrier(self._group)  # every message has arrived, so the counters include it
        if before is not None and (after := link_counters()) is not None:
            pairs = zip(before, after, strict=True)
            self._sent.append([(end - begin) / self._round for begin, end in pairs])

    @property
    def diverged(self) -> bool:
        """Return whether no update will succeed any more; alike on all ranks."""
        # copies that train alone do not know of one that diverges
        rare = self.strategy.sync is not None
        return not rare and has_diverged(self._events, self._built.loss_scaled)

    def losses(self) -> list[float]:
        """Return the mean losses over the ranks of the first steps, on every rank."""
        ranks = gather_values([event.loss for event in self._events[:_LOSSES]], self._group)
        return [statistics.fmean(step) for step in zip(*ranks, strict=True)]

    def timed_run(self, contention: Contention | None) -> TimingResult | None:
        """Trace a few more steps; return the record of those since `begin`, on rank 0.

        Args:
            contention: during the steps of all runs.
        """
        mine = {
            "step_ms": self.step_ms,
            "sent": self._sent,
            "ledger": self._built.engine.ledger.summary(),
        }
        ranks = gather_values(mine, self._group)
        dist.barrier(self._group)
        steps = self._plan.train.profiled_steps
        trace = traced_steps(self._built.loop, steps, self.strategy.sync)
        traces = gather_values(trace, self._group)
        if dist.get_rank(self._group) != 0:
            return None
        with temporary("shardlab-trace") as folder:
            path = folder / "trace.json.gz"
            write_trace_of(traces, path)
            breakdown = analyse(path)
        return self._record(contention, ranks, breakdown)

    def _record(
        self, contention: Contention | None, ranks: list[dict[str, Any]], breakdown: Breakdown
    ) -> TimingResult:
        plan = self._plan
        steps = len(self.step_ms) * self._round
        ledger = mean_ledger([rank["ledger"] for rank in ranks], steps)
        counted = np.array([rank["sent"] for rank in ranks]).reshape(-1, len(LinkCounters._fields))
        means = counted.mean(axis=0).tolist() if counted.size else [None] * counted.shape[1]
        sent = dict(zip(LinkCounters._fields, means, strict=True))
        return TimingResult(
            **header(plan, self.run, self._built.parameters, self._link.kind),
            units=self._built.units,
            threads=plan.train.threads,
            step_ms=slowest([rank["step_ms"] for rank in ranks]),
            contention=contention,
            bytes_raw=sum(kind["bytes_raw"] for kind in ledger.values()),
            bytes_wire=sum(kind["bytes_wire"] for kind in ledger.values()),
            interface_bytes=sent["nbytes"],
            interface_frames=sent["frames"],
            interface_bytes_inside=sent["inside"],
            ledger=ledger,
            breakdown=breakdown,
        )


def slowest(ranks: list[list[float]]) -> list[float]:
    """Return the times of the slowest rank, step by step."""
    return [max(step) for step in zip(*ranks, strict=True)]
