"""Race: interleaved steps of an incumbent and its challengers until it is known which are faster.

A race is a timing that looks at the step times after every block. An arm that diverges leaves. When
ranks fail in the step of an arm, that arm has failed, and the others race again from the beginning.
"""

import mmap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from shardlab.codecs import native
from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.config.timing_record import BLOCK, NO_COMMUNICATION, Arm, Race, Ruling
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import temporary
from shardlab.core.launch_environment import rank_environment
from shardlab.core.progress import stopwatch
from shardlab.train.interleaved import Look, interleave, launch_plan
from shardlab.train.launch import RunFailed
from shardlab.train.plans import TimingPlan

_LAST_LOOK = 0.5
"""share of the time of a race after which no look comes: the rest is for traces, since a race that
is ended by force has no record, and for another attempt without an arm that fails"""
_HUNG = 0.5
"""share of the time of a race after which a single step is the arm's fault"""


def race(plan: TimingPlan, output: Path, look: Look, limit_s: float) -> None:
    """Write the `Race` of the runs of the plan, of which the first is the incumbent.

    The arm in whose step ranks fail is left out of another attempt. All arms share the memory:
    where the incumbent lacks it, no arm is to blame, and there is no race. Under torchrun or srun
    there is one attempt, and its failure names the run.

    Args:
        plan: its repetitions are the most.
        look: called on rank 0 after every `BLOCK` repetitions. Runs that diverged are missing in
            what it gets.
        limit_s: seconds of all attempts together. A look is the last if the next would come after
            half of what is left. Where no look comes in time, no arm is to blame.

    Raises:
        RunFailed: ranks failed outside of any arm's step.
        UserError: the data, the model or the link cannot be used.
    """
    native.library()  # says once, and not once per rank, when there are no compiled kernels
    elapsed = stopwatch()
    incumbent, *challengers = list(plan.timing.runs)
    failed: dict[str, Arm] = {}
    found = Race(name=plan.name, incumbent=incumbent, arms={}, reason="", seconds=0, runs=[])
    with (
        emulated(plan.timing.link, plan.timing.world_size) as link,
        temporary("shardlab-race") as folder,
    ):
        record = folder / "race.json"
        while not found.reason:
            runs = tuple(run for run in plan.timing.runs if run not in failed)
            part = replace(plan, timing=plan.timing.model_copy(update={"runs": runs}))
            marks = _Marks(part)
            try:
                _attempt(part, link, record, look, marks, limit_s - elapsed())
            except StorageError:
                raise  # no property of an arm
            except (RunFailed, UserError) as error:
                run, arm = _blamed(error, marks, plan, limit_s), _failed_arm(error)
                reason = "" if run else f"the race failed: {arm.detail}"
                if run:
                    failed[run] = arm
                if run == incumbent:
                    reason = "the incumbent failed"
                elif failed.keys() >= {*challengers}:
                    reason = "every challenger failed"
                found = found.model_copy(update={"reason": reason})
            else:
                if not record.exists():
                    return  # rank 0, which writes, is on another node
                found = Race.from_file(record, "race again")
    update = {"arms": found.arms | failed, "seconds": elapsed()}
    found.model_copy(update=update).to_file(output)


class _Marks:
    """Runs at which the ranks are, in memory that forked ranks share with their parent."""

    def __init__(self, plan: TimingPlan) -> None:
        self._runs = ["", *plan.runs]
        shape = plan.timing.world_size, 3
        self._ranks = np.frombuffer(mmap.mmap(-1, 24 * shape[0]), np.int64).reshape(shape)

    def mark(self, rank: int, run: str) -> None:
        """Record of which run the next calls of the rank are."""
        count = self._ranks[rank, 0] + 1
        self._ranks[rank] = count, self._runs.index(run), time.monotonic_ns()

    def behind(self) -> tuple[str, float]:
        """Return the run of the rank that has come least far, and for how many seconds it has been
        there; empty: it was at no run.

        Barriers part the steps, so no rank has gone beyond the one that fails.
        """
        marks = self._ranks[self._ranks[:, 0] > 0]  # ranks of torchrun do not share this memory
        if not len(marks):
            return "", 0.0
        _, run, since = marks[marks[:, 0].argmin()]
        return self._runs[int(run)], (time.monotonic_ns() - int(since)) / 1e9


def _attempt(
    plan: TimingPlan, link: Emulation, record: Path, look: Look, marks: _Marks, limit_s: float
) -> None:
    """Write the record of a race of all runs of the plan, on rank 0."""
    elapsed = stopwatch()

    def look_in_time(step_ms: dict[str, list[float]]) -> Ruling:
        ruling = look(step_ms)
        block_s = sum(sum(times[-BLOCK:]) for times in step_ms.values()) / 1e3
        if ruling.stop is None and elapsed() + block_s > _LAST_LOOK * limit_s:
            return ruling._replace(stop=f"half of {limit_s:.0f} s is over")
        return ruling

    worker = partial(_work, plan, link, record, look_in_time, marks)
    launch_plan(plan, link, worker, max(limit_s, 0.01))


def _blamed(
    error: RunFailed | UserError, marks: _Marks, plan: TimingPlan, limit_s: float
) -> str | None:
    """Return the arm that made an attempt fail; None where no arm is to blame.

    Raises:
        RunFailed, UserError: no further attempt is possible.
    """
    (run, step_s), arm = marks.behind(), _failed_arm(error)
    kind = error.kind if isinstance(error, RunFailed) else "crash"
    if run and rank_environment(plan.timing.world_size) is not None:
        # ranks of torchrun or srun are not this command's to start again
        raise RunFailed(kind, str(error), f"{run}: {arm.detail}")
    at_arm = run in plan.timing.runs
    hung = isinstance(error, RunFailed) and error.hung
    late = kind == "timeout" and not hung and not (at_arm and step_s >= _HUNG * limit_s)
    if late or (arm.outcome == "memory" and run == plan.timing.runs[0]):
        return None
    if not at_arm:
        raise error
    return run


def _failed_arm(error: RunFailed | UserError) -> Arm:
    """Return the outcome of the arm that is to blame."""
    if isinstance(error, UserError):  # not chosen by a user, so a refusal is data
        return Arm(outcome="crash", detail=str(error))
    return Arm(outcome="timeout" if error.hung else error.kind, detail=error.summary)


def _work(
    plan: TimingPlan,
    link: Emulation,
    record: Path,
    look: Look,
    marks: _Marks,
    group: dist.ProcessGroup,
) -> None:
    mark = partial(marks.mark, dist.get_rank(group))
    whole = interleave(plan, link, BLOCK, look, mark, group)
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
