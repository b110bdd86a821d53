"""Interleaved steps of several strategies in the processes of one set of ranks.

The speed of a machine drifts by more than strategies differ. So each rank holds an engine for every
strategy, and in each repetition each engine does one step, in another order every time: steps of
one repetition are compared in pairs.
"""

import itertools
import math
import multiprocessing
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.comm.object_collectives import gather_values
from shardlab.core.device import compute_deterministically
from shardlab.core.errors import RunFailed, UserError, shorten
from shardlab.core.files import temporary
from shardlab.core.host import CpuMeter, total
from shardlab.core.launch_environment import rank_environment
from shardlab.core.progress import say, track
from shardlab.kernels import native
from shardlab.results.contention import Contention
from shardlab.results.files import read_results, write_results
from shardlab.results.result import Failure, only
from shardlab.results.timing_result import NO_COMMUNICATION, RaceDecision, TimingResult
from shardlab.train.agreement import open_training_tokens, refuse_differences
from shardlab.train.blame import Marks, blamed
from shardlab.train.header import failure
from shardlab.train.launch import Worker, launch, launch_together
from shardlab.train.plans import TimingPlan
from shardlab.train.timing import Runner, slowest

_UNTIMED_REPETITIONS = 2
"""first steps allocate memory, and DDP rebuilds its buckets after one"""

_MEMORY_FIX = (
    "the engines of all runs that take turns are in memory together: name fewer `runs`, or move a "
    "timing out of `interleaved`"
)
_CRASHED = "crashed.json"
"""file of an attempt with the run that is to blame for its end"""

Look = Callable[[dict[str, list[float]]], RaceDecision]
"""rules on a race from the step times of the slowest rank, by run: one per repetition, fewer for a
run that has left"""
Mark = Callable[[str], None]
"""says of which run the next calls are; empty: of none"""


class Turns:
    """Turns of several timings, created before their ranks are forked.

    A timing has a turn for each repetition and one for what follows. The next turn is that of the
    timing that has done the smallest share of its repetitions. Whoever watches the ranks has to end
    all of them when one fails: the others would wait forever.

    Args:
        timings: number of repetitions and of ranks of each timing.
    """

    def __init__(self, timings: Sequence[tuple[int, int]]) -> None:
        fork = multiprocessing.get_context("fork")
        shares = [
            (number / repetitions, timing)
            for timing, (repetitions, _) in enumerate(timings)
            for number in range(repetitions + 1)
        ]
        self._order = [timing for _, timing in sorted(shares)]
        self._all_there = fork.Barrier(sum(ranks for _, ranks in timings))
        self._ended = fork.Condition()
        self._turn = fork.Value("i", 0, lock=False)

    def of(self, timing: int, rank: int) -> Iterator[None]:
        """Wait for each turn of a timing, on one of its ranks; the next one ends that before.

        All ranks of the timing end a turn after a barrier.
        """
        self._all_there.wait()
        for turn, other in enumerate(self._order):
            if other != timing:
                continue
            with self._ended:
                while self._turn.value != turn:
                    self._ended.wait()
            yield
            if rank == 0:
                with self._ended:
                    self._turn.value += 1
                    self._ended.notify_all()


class Interleaved(NamedTuple):
    """Runs after their last repetition, alike on all ranks except for their times."""

    runners: list[Runner]
    reason: str
    """why it was the last"""
    contention: Contention | None

    def timed(self, mark: Mark) -> list[TimingResult]:
        """Trace some steps of all runs; return their records on rank 0, and none elsewhere."""
        records = []
        for runner in self.runners:
            mark(runner.run)
            records.append(runner.timed_run(self.contention))
        return [record for record in records if record is not None]


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


def interleave(
    plan: TimingPlan,
    link: Emulation,
    block: int,
    look: Look,
    mark: Mark,
    group: dist.ProcessGroup,
    turns: Iterator[None] | None = None,
    shown: bool = True,
) -> Interleaved:
    """Do repetitions until a look stops them, or as many as the plan says.

    Args:
        block: repetitions before each look. Runs that have diverged by then leave.
        look: called on rank 0.
        mark: called on each rank before each part of a run.
        turns: advanced before each repetition and at the end; None: the machine is this timing's.
        shown: whether its progress is shown.
    """
    runners = _build(plan, link, mark, group)
    used = []
    most = plan.timing.repetitions
    reason = f"all of {most} repetitions"
    numbers: Iterable[int] = range(most)
    if shown and dist.get_rank(group) == 0:
        numbers = track(numbers, f"time {plan.name}", total=most, unit="repetition")
    turns = itertools.repeat(None) if turns is None else turns
    for number in numbers:
        next(turns)
        meter = CpuMeter()
        for index in order(number, len(runners)):
            if runners[index].active:
                mark(runners[index].run)
                runners[index].step()
        mark("")
        used.append(meter.read())
        if (number + 1) % block and number + 1 < most:
            continue
        ruling = _ruling(runners, look, group)
        if ruling.stop is not None:
            reason = ruling.stop
            break
        for runner in runners:
            runner.active &= runner.run not in ruling.leave and not runner.diverged
    next(turns)
    contention = Contention.of(gather_values(total(used), group))
    return Interleaved(runners, reason, contention)


def _build(plan: TimingPlan, link: Emulation, mark: Mark, group: dist.ProcessGroup) -> list[Runner]:
    """Return all runs of the plan after their untimed steps."""
    refuse_differences(plan, group)
    if plan.train.deterministic:
        compute_deterministically()
    split = open_training_tokens(plan.data)
    runners = []
    for run in plan.runs:
        dist.barrier(group)  # so that a rank that fails is the one that is behind
        mark(run)
        runners.append(Runner(plan, run, split, link, group))
    for _ in range(_UNTIMED_REPETITIONS):
        for runner in runners:
            mark(runner.run)
            runner.step()
    mark("")
    for runner in runners:
        runner.begin()
    return runners


def _ruling(runners: list[Runner], look: Look, group: dist.ProcessGroup) -> RaceDecision:
    """Return what rank 0 rules, on every rank."""
    step_ms = {runner.run: runner.step_ms for runner in runners}
    ranks = gather_values(step_ms, group)
    ruling = None
    if dist.get_rank(group) == 0:
        ruling = look(
            {
                runner.run: slowest([rank[runner.run] for rank in ranks])
                for runner in runners
                if runner.run != NO_COMMUNICATION and not runner.diverged
            }
        )
    return RaceDecision(*gather_values(ruling, group)[0])


def order(number: int, count: int) -> list[int]:
    """Return the order of the runs in a repetition: the same on all ranks."""
    shuffled = list(range(count))
    random.Random(number).shuffle(shuffled)
    return shuffled


def time_strategies(plans: Sequence[TimingPlan], output: Path, leave_out: bool = False) -> None:
    """Write a `TimingResult` of every run of the plans, in their order.

    Args:
        leave_out: whether a run in whose step ranks fail is left out of its plan: all plans begin
            again without it, and it has a `Failure`.

    Raises:
        RunFailed: a rank failed; `output` is as it was.
        UserError: the data, the model or a link cannot be used; or there are several plans, and
            torchrun or srun started this process.
    """
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    first, *others = (plan.name for plan in plans)
    if rank_environment(plans[0].timing.world_size) is not None:
        if others:
            raise UserError(
                f"timings.{first}.interleaved: timings take turns on one machine, without torchrun "
                f"or srun: move {', '.join(others)} to timings"
            )
        _time(plans[0], output)
        return
    crashed: list[Failure] = []
    with temporary("shardlab-timings") as folder:
        while (timed := _attempt(plans, folder, leave_out)) is None:
            crash = Failure.from_file(folder / _CRASHED, "time again")
            where = f"{crash.run} in timing {crash.timing}"
            say(
                f"crashed: {where}: {crash.detail}; the others are timed without it. To time it "
                f"again: rm {output}, or dvc repro --force --single-item timing@{output.stem}"
            )
            plans = [_without(plan, crash) for plan in plans]
            crashed.append(crash)
    write_results(output, [*timed, *crashed])


def _attempt(
    plans: Sequence[TimingPlan], folder: Path, leave_out: bool
) -> list[TimingResult] | None:
    """Return the runs of all plans; None where one is to be left out, which is in a file."""
    files = [folder / f"{plan.name}.jsonl" for plan in plans]
    (folder / _CRASHED).unlink(missing_ok=True)
    try:
        if len(plans) == 1:
            _time(plans[0], files[0])
        else:
            turns = Turns([(plan.timing.repetitions, plan.timing.world_size) for plan in plans])
            launch_together(
                {
                    f"timing {plan.name}": partial(_time, plan, file, turns, number)
                    for number, (plan, file) in enumerate(zip(plans, files, strict=True))
                }
            )
    except RunFailed as error:
        if leave_out and (folder / _CRASHED).exists():
            say(str(error))
            return None
        if error.outcome == "memory":
            raise RunFailed("memory", f"{error.detail}; {_MEMORY_FIX}", error.summary) from None
        raise
    timed = (only(read_results(file, "time again"), TimingResult) for file in files)
    return [*itertools.chain.from_iterable(timed)]


def _without(plan: TimingPlan, crash: Failure) -> TimingPlan:
    left = tuple(run for run in plan.timing.runs if (plan.name, run) != (crash.timing, crash.run))
    return replace(plan, timing=plan.timing.model_copy(update={"runs": left}))


def _time(plan: TimingPlan, output: Path, turns: Turns | None = None, number: int = 0) -> None:
    """Time a plan; where one of several runs is to blame for a failure, name it in a file."""
    marks = Marks(plan)
    with emulated(plan.timing.link, plan.timing.world_size) as link:
        try:
            launch_plan(plan, link, partial(_work, plan, link, output, turns, number, marks))
        except RunFailed as error:
            run = blamed(error, marks, plan, math.inf)
            if run is not None and len(plan.timing.runs) > 1:
                crash = failure(plan, run, error.outcome, shorten(error.summary))
                crash.to_file(output.with_name(_CRASHED))
            raise


def _work(
    plan: TimingPlan,
    link: Emulation,
    output: Path,
    turns: Turns | None,
    number: int,
    marks: Marks,
    group: dist.ProcessGroup,
) -> None:
    def look(step_ms: dict[str, list[float]]) -> RaceDecision:
        return RaceDecision()

    mark = partial(marks.mark, dist.get_rank(group))
    own = None if turns is None else turns.of(number, dist.get_rank(group))
    shown = number == 0  # one bar for all
    whole = interleave(plan, link, plan.timing.repetitions, look, mark, group, own, shown)
    timed = whole.timed(mark)
    if timed:
        write_results(output, timed)
        say(f"timing {plan.name}: {len(timed)} runs of {plan.timing.repetitions} repetitions")
    dist.barrier(group)
    if own is not None:
        next(own, None)  # ends the last turn
