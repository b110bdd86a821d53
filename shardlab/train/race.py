"""Race: interleaved steps of an incumbent and its challengers until it is known which are faster.

A race is a timing that looks at the step times after every block, and that outlives its arms: one
that diverges leaves, and one that hangs, crashes or lacks memory is left out of another attempt.
"""

import mmap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from shardlab.codecs.kernels import native
from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.config.race_record import BLOCK, Arm, Race, Ruling
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import temporary
from shardlab.core.progress import stopwatch
from shardlab.train.interleaved import Look, interleave, launch_plan
from shardlab.train.launch import RunFailed
from shardlab.train.launch_environment import rank_environment
from shardlab.train.timing_plan import TimingPlan
from shardlab.train.turns import Alone

_TRIED = 3
"""repetitions of one challenger alone with the incumbent, to learn which of them fails"""

_LAST_LOOK = 0.75
"""share of the time of an attempt after which no look comes"""

_HUNG = 0.5
"""share of the time of an attempt after which a single step is the arm's fault"""


def race(plan: TimingPlan, output: Path, look: Look, limit_s: float) -> None:
    """Write the `Race` of the runs of the plan, of which the first is the incumbent.

    When ranks fail, the arm whose step they were in is the cause. Where that says nothing, since
    all arms share the memory, or since it was the incumbent's, each challenger does a few steps
    with the incumbent alone, and those that fail are. The others race again, from the beginning.

    Under torchrun or srun there is one attempt, and its failure names the run.

    Args:
        plan: its repetitions are the most.
        look: called on rank 0 after every `BLOCK` repetitions; its state is lost when an attempt
            fails. Runs that diverged are missing in what it gets.
        limit_s: seconds of all attempts together. An attempt gets half of what is left, and a look
            is the last if the next would come after three quarters of that. So it is to be three
            times what `look` allows. Where no look comes in time, no arm is the cause.

    Raises:
        RunFailed: ranks failed, and no arm is the cause.
        UserError: the data, the model or the link cannot be used.
    """
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    elapsed = stopwatch()
    incumbent, *challengers = plan.timing.runs
    failed: dict[str, Arm] = {}
    found = None
    with (
        emulated(plan.timing.link, plan.timing.world_size) as link,
        temporary("shardlab-race") as folder,
    ):
        record = folder / "race.json"
        attempt = partial(_attempt, link, record, lambda: (limit_s - elapsed()) / 2)
        try:
            while incumbent not in failed and not failed.keys() >= {*challengers}:
                try:
                    attempt(_of(plan, [arm for arm in plan.timing.runs if arm not in failed]), look)
                except _Failed as failure:
                    failed |= _causes(plan, failure, attempt, failed)
                else:
                    if not record.exists():
                        return  # rank 0, which writes, is on another node
                    found = Race.from_file(record, "race again")
                    break
            reason = "the incumbent failed" if incumbent in failed else "every challenger failed"
        except _NoTimeError:
            reason = f"the time limit of {limit_s:g} s came before the first look at the step times"
    if found is None:
        found = Race(
            name=plan.name, incumbent=incumbent, arms={}, reason=reason, seconds=0, runs=[]
        )
    update = {"arms": found.arms | failed, "seconds": elapsed()}
    found.model_copy(update=update).to_file(output)


class _Marks:
    """Runs at which the ranks are, in memory that forked ranks share with their parent."""

    def __init__(self, plan: TimingPlan) -> None:
        self._runs = ["", *plan.runs]
        shape = plan.timing.world_size, 3
        self._ranks = np.frombuffer(mmap.mmap(-1, 24 * shape[0]), np.int64).reshape(shape)

    def mark(self, rank: int, run: str) -> None:
        """Say of which run the next calls of the rank are."""
        count = self._ranks[rank, 0] + 1
        self._ranks[rank] = count, self._runs.index(run), time.monotonic_ns()

    def behind(self, ranks: slice = slice(None)) -> tuple[str, float]:
        """Return the run of the rank that has come least far, and for how many seconds it has been
        there; empty: it was at no run. `ranks` are those that share this memory.

        Barriers part the steps, so no rank has gone beyond the one that fails.
        """
        known = self._ranks[ranks]
        _, run, since = known[known[:, 0].argmin()]
        return self._runs[int(run)], (time.monotonic_ns() - int(since)) / 1e9


class _NoTimeError(Exception):
    """The time limit ended an attempt before a look at the step times."""


class _Failed(Exception):
    """Attempt that ended early."""

    def __init__(self, error: RunFailed | UserError, run: str) -> None:
        super().__init__(str(error))
        self.error = error
        self.run = run
        """at which the ranks were"""

    @property
    def arm(self) -> Arm:
        """The arm that is the cause."""
        if isinstance(self.error, UserError):
            return Arm(outcome="crash", detail=str(self.error))
        outcome = "timeout" if self.error.hung else self.error.kind
        return Arm(outcome=outcome, detail=self.error.summary)

    @property
    def named(self) -> RunFailed:
        """The failure with the name of its run; what the user did not choose is no `UserError`."""
        summary = f"{self.run}: {self.arm.detail}"
        if isinstance(self.error, UserError):
            return RunFailed("crash", str(self.error), summary)
        return RunFailed(self.error.kind, self.error.detail, summary)


def _of(plan: TimingPlan, runs: list[str], **timing: int) -> TimingPlan:
    update = {"runs": tuple(runs), **timing}
    return replace(plan, timing=plan.timing.model_copy(update=update))


def _attempt(
    link: Emulation, record: Path, left_s: Callable[[], float], plan: TimingPlan, look: Look
) -> None:
    """Write the record of a race of all runs of the plan, on rank 0.

    Raises:
        _Failed: an arm may be the cause.
        _NoTimeError: no arm is, all together are too slow.
    """
    marks, limit_s = _Marks(plan), left_s()
    elapsed = stopwatch()

    def look_in_time(step_ms: dict[str, list[float]]) -> Ruling:
        ruling = look(step_ms)
        block_s = sum(sum(times[-BLOCK:]) for times in step_ms.values()) / 1e3
        # the rest is for traces: a race that is ended by force has no record
        if ruling.stop is None and elapsed() + block_s > _LAST_LOOK * limit_s:
            return Ruling(f"the {limit_s:.0f} s of an attempt are nearly over")
        return ruling

    worker = partial(_work, plan, link, record, look_in_time, marks)
    try:
        launch_plan(plan, link, worker, limit_s)
    except StorageError:
        raise  # no property of an arm
    except (RunFailed, UserError) as error:
        here = rank_environment(plan.timing.world_size)
        if here is not None:
            # ranks of torchrun or srun are not this command's to start again
            run, _ = marks.behind(slice(here.rank, here.rank + 1))
            if run:
                raise _Failed(error, run).named from error
            raise
        run, step_s = marks.behind()
        timeout = isinstance(error, RunFailed) and error.kind == "timeout"
        if timeout and (not run or step_s < _HUNG * limit_s):
            raise _NoTimeError from error
        if not run:
            raise
        raise _Failed(error, run) from error


def _causes(
    plan: TimingPlan,
    failure: _Failed,
    attempt: Callable[[TimingPlan, Look], None],
    failed: dict[str, Arm],
) -> dict[str, Arm]:
    """Return the arms that made an attempt fail.

    Raises:
        RunFailed, UserError: none did.
    """
    incumbent, *others = (arm for arm in plan.timing.runs if arm not in failed)
    if failure.run in others and failure.arm.outcome != "memory":
        return {failure.run: failure.arm}
    alone = {}
    for arm in others:
        try:
            attempt(_of(plan, [incumbent, arm], repetitions=_TRIED), lambda _: Ruling())
        except _Failed as again:
            alone[arm] = again.arm
    if alone and (failure.run != incumbent or len(alone) < len(others)):
        return alone
    if failure.run == NO_COMMUNICATION:
        raise failure.error
    return {failure.run: failure.arm}


def _work(
    plan: TimingPlan,
    link: Emulation,
    record: Path,
    look: Look,
    marks: _Marks,
    group: dist.ProcessGroup,
) -> None:
    mark = partial(marks.mark, dist.get_rank(group))
    whole = interleave(plan, link, BLOCK, look, mark, Alone(), group)
    arms = {
        runner.run: Arm(
            outcome="diverged" if runner.diverged else "ok",
            detail="its gradients are not finite" if runner.diverged else "",
            losses=[*runner.losses()],
        )
        for runner in whole.runners
        if runner.run != NO_COMMUNICATION
    }
    timed = whole.timed(mark)
    if timed:
        Race(
            name=plan.name,
            incumbent=plan.timing.runs[0],
            arms=arms,
            reason=whole.reason,
            seconds=0,  # the command knows them
            runs=[run for run in timed if run.run not in arms or arms[run.run].outcome == "ok"],
        ).to_file(record)
