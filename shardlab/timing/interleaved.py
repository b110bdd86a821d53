"""Interleaved steps of several strategies in the processes of one set of ranks.

The speed of a machine drifts by more than strategies differ. So each rank holds an engine for every
strategy, and in each repetition each engine does one step, in another order every time: steps of
one repetition are compared in pairs.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardlab.core.progress import say, track
from shardlab.data.tokens.tokens import open_split
from shardlab.devices.determinism import compute_deterministically
from shardlab.emulation.link import Emulation, emulated
from shardlab.environment.cpu_times import CpuMeter
from shardlab.kernels import native
from shardlab.launch import Worker, launch
from shardlab.records.contention import Contention
from shardlab.records.race import Ruling
from shardlab.records.timing import NO_COMMUNICATION, TimedRun, write_timings
from shardlab.timing.plan import TimingPlan
from shardlab.timing.runner import Runner, slowest
from shardlab.transport.object_collectives import gather_values

_UNTIMED_REPETITIONS = 2
"""first steps allocate memory, and DDP rebuilds its buckets after one"""

Look = Callable[[dict[str, list[float]]], Ruling]
"""rules on a race from the step times of the slowest rank, by run: one per repetition, fewer for a
run that has left"""
Mark = Callable[[str], None]
"""says of which run the next calls are; empty: of none"""


class Interleaved(NamedTuple):
    """Runs after their last repetition, alike on all ranks except for their times."""

    runners: list[Runner]
    reason: str
    """why it was the last"""
    contention: Contention | None

    def timed(self, mark: Mark) -> list[TimedRun]:
        """Trace some steps of all runs; return their records on rank 0, and none elsewhere."""
        found = []
        for runner in self.runners:
            mark(runner.run)
            found.append(runner.timed_run(self.contention))
        return [each for each in found if each is not None]


def time_strategies(plan: TimingPlan, output: Path) -> None:
    """Write a `TimedRun` of every run of the plan, in their order.

    Raises:
        RunFailed: a rank failed; `output` is as it was.
        UserError: the data, the model or the link cannot be used.
    """
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    with emulated(plan.timing.link, plan.timing.world_size) as link:
        launch_plan(plan, link, partial(_work, plan, link, output))


def launch_plan(
    plan: TimingPlan, link: Emulation, worker: Worker, limit_s: float | None = None
) -> None:
    """Launch the ranks of a plan; errors are those of `launch`."""
    train, ranks = plan.train, plan.timing.world_size
    launch(
        worker,
        ranks,
        train.threads,
        train.timeout_s,
        limit_s,
        links=link.links,
        placement=train.placement,
    )


def _work(plan: TimingPlan, link: Emulation, output: Path, group: dist.ProcessGroup) -> None:
    def look(step_ms: dict[str, list[float]]) -> Ruling:
        return Ruling()

    def mark(run: str) -> None:
        pass

    whole = interleave(plan, link, plan.timing.repetitions, look, mark, group)
    timed = whole.timed(mark)
    if timed:
        write_timings(output, timed)
        say(f"{plan.name}: {len(timed)} runs of {plan.timing.repetitions} repetitions")


def interleave(
    plan: TimingPlan, link: Emulation, block: int, look: Look, mark: Mark, group: dist.ProcessGroup
) -> Interleaved:
    """Do repetitions until a look stops them, or as many as the plan says.

    Args:
        block: repetitions before each look. Runs that have diverged by then leave.
        look: called on rank 0.
        mark: called on each rank before each part of a run.
    """
    if plan.train.deterministic:
        compute_deterministically()
    chief = dist.get_rank(group) == 0
    share = slice(dist.get_rank(group), None, dist.get_world_size(group))
    split = open_split(plan.data / "tokens", "train", share)
    runners = []
    for run in plan.runs:
        dist.barrier(group)  # so that a rank that fails is the one that is behind
        mark(run)
        runners.append(Runner(plan, run, split, link, group))
    for _ in range(_UNTIMED_REPETITIONS):
        for runner in runners:
            mark(runner.run)
            runner.step()
    for runner in runners:
        runner.begin()
    meter = CpuMeter()
    most = plan.timing.repetitions
    reason = f"all of {most} repetitions"
    numbers = range(most)
    for number in track(numbers, f"time {plan.name}", unit="repetition") if chief else numbers:
        for index in order(number, len(runners)):
            if runners[index].active:
                mark(runners[index].run)
                runners[index].step()
        if (number + 1) % block and number + 1 < most:
            continue
        mark("")
        ruling = _ruling(runners, look, group)
        if ruling.stop is not None:
            reason = ruling.stop
            break
        for runner in runners:
            runner.active &= runner.run not in ruling.leave and not runner.diverged
    used = Contention.of(gather_values(meter.read(), group))
    return Interleaved(runners, reason, used)


def _ruling(runners: list[Runner], look: Look, group: dist.ProcessGroup) -> Ruling:
    """Return what rank 0 rules, on every rank."""
    own = {runner.run: runner.step_ms for runner in runners}
    ranks = gather_values(own, group)
    ruling = None
    if dist.get_rank(group) == 0:
        ruling = look(
            {
                runner.run: slowest([rank[runner.run] for rank in ranks])
                for runner in runners
                if runner.run != NO_COMMUNICATION and not runner.diverged
            }
        )
    return Ruling(*gather_values(ruling, group)[0])


def order(number: int, count: int) -> list[int]:
    """Return the order of the runs in a repetition: the same on all ranks."""
    shuffled = list(range(count))
    random.Random(number).shuffle(shuffled)
    return shuffled
