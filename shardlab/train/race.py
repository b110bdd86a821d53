"""Race: interleaved steps of an incumbent and its challengers until it is known which are faster.

A race is a timing that looks at the step times after every block. An arm that diverges leaves. When
ranks fail in the step of an arm, that arm has failed, and the others race again from the beginning.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from shardlab.comm.emulated_link import Emulation, emulated
from shardlab.core.errors import StorageError, UserError
from shardlab.core.files import finite, temporary
from shardlab.core.progress import stopwatch
from shardlab.kernels import native
from shardlab.results.result import Failure, FailureOutcome
from shardlab.results.timing_result import BLOCK, NO_COMMUNICATION, Race, RaceDecision
from shardlab.train.blame import Marks, blamed
from shardlab.train.header import failure
from shardlab.train.interleaved import Look, interleave, launch_plan
from shardlab.train.launch import RunFailed
from shardlab.train.plans import TimingPlan

_LAST_LOOK = 0.5
"""share of the time of a race after which no look comes: the rest is for traces, since a race that
is ended by force has no record, and for another attempt without an arm that fails"""


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
    failed: dict[str, Failure] = {}
    found = Race(name=plan.name, incumbent=incumbent, reason="", seconds=0, runs=[])
    with (
        emulated(plan.timing.link, plan.timing.world_size) as link,
        temporary("shardlab-race") as folder,
    ):
        record = folder / "race.json"
        while not found.reason:
            runs = tuple(run for run in plan.timing.runs if run not in failed)
            part = replace(plan, timing=plan.timing.model_copy(update={"runs": runs}))
            marks = Marks(part)
            try:
                _attempt(part, link, record, look, marks, limit_s - elapsed())
            except StorageError:
                raise  # no property of an arm
            except (RunFailed, UserError) as error:
                run = blamed(error, marks, plan, limit_s)
                outcome, detail = _outcome(error)
                late = ": raise agent.trial_timeout_s" if outcome == "timeout" else ""
                reason = "" if run else f"the race failed: {detail}{late}"
                if run:
                    failed[run] = failure(plan, run, outcome, detail)
                if run == incumbent:
                    reason = "the incumbent failed"
                elif failed.keys() >= {*challengers}:
                    reason = "every challenger failed"
                found = found.model_copy(update={"reason": reason})
            else:
                if not record.exists():
                    return  # rank 0, which writes, is on another node
                found = Race.from_file(record, "race again")
    update = {"failures": [*found.failures, *failed.values()], "seconds": elapsed()}
    found.model_copy(update=update).to_file(output)


def _attempt(
    plan: TimingPlan, link: Emulation, record: Path, look: Look, marks: Marks, limit_s: float
) -> None:
    """Write the record of a race of all runs of the plan, on rank 0."""
    elapsed = stopwatch()

    def look_in_time(step_ms: dict[str, list[float]]) -> RaceDecision:
        ruling = look(step_ms)
        block_s = sum(sum(times[-BLOCK:]) for times in step_ms.values()) / 1e3
        if ruling.stop is None and elapsed() + block_s > _LAST_LOOK * limit_s:
            return ruling._replace(stop=f"half of {limit_s:.0f} s is over")
        return ruling

    worker = partial(_work, plan, link, record, look_in_time, marks)
    launch_plan(plan, link, worker, max(limit_s, 0.01))


def _work(
    plan: TimingPlan,
    link: Emulation,
    record: Path,
    look: Look,
    marks: Marks,
    group: dist.ProcessGroup,
) -> None:
    mark = partial(marks.mark, dist.get_rank(group))
    whole = interleave(plan, link, BLOCK, look, mark, group)
    arms = [runner for runner in whole.runners if runner.run != NO_COMMUNICATION]
    losses = {runner.run: [*runner.losses()] for runner in arms}
    diverged = [
        failure(plan, runner.run, "diverged", "its gradients are not finite")
        for runner in arms
        if runner.diverged
    ]
    lost = {failed.run for failed in diverged}
    timed = whole.timed(mark)
    if timed:
        Race(
            name=plan.name,
            incumbent=plan.timing.runs[0],
            reason=whole.reason,
            seconds=0,  # the command knows them
            runs=[
                run.model_copy(update={"losses": finite(losses.get(run.run, []))})
                for run in timed
                if run.run not in lost
            ],
            failures=diverged,
        ).to_file(record)


def _outcome(error: RunFailed | UserError) -> tuple[FailureOutcome, str]:
    """Return how the run that is to blame ended, and the error in one line."""
    if isinstance(error, UserError):  # not chosen by a user, so a refusal is data
        return "crash", str(error)
    return error.outcome, error.summary
