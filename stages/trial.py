"""Race the arms of a round, then train the fastest that has no record.

Ranks on several nodes are tasks of job steps: each race and each run is one step, and this stage,
outside of them, starts one after the other.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from shardlab.choose.decision import train_promising
from shardlab.choose.race_rule import RaceRule, decide_race
from shardlab.choose.records import Candidate, Proposal, Trial, TrialSettings
from shardlab.choose.settings import Agent
from shardlab.core.document import Document, validate
from shardlab.core.errors import RunFailed, StorageError, UserError
from shardlab.core.files import atomic, read_json, unfinished, write_json
from shardlab.core.progress import say, stopwatch
from shardlab.models.settings import Model
from shardlab.results.files import AnyResult
from shardlab.results.result import Failure
from shardlab.results.settings import Timing
from shardlab.results.timing_result import Race, RaceDecision
from shardlab.results.train_result import TrainResult
from shardlab.train.header import failure
from shardlab.train.plans import RunPlan, TimingPlan
from shardlab.train.race import race
from shardlab.train.run import train_run
from shardlab.train.settings import Train
from stages.common import refuse_other_source, refuse_other_tokens
from stages.profile import break_down
from stages.sections import Sections
from stages.validate import validate_seed

DATA = Path("data")
_FAILED = "failed.json"
_LONGEST_DETAIL = 4000
T = TypeVar("T", TrainResult, Failure)
_ERRORS = {kind.__name__: kind for kind in (RunFailed, StorageError, UserError)}


class Step(Document):
    """A job step: the race of the round, or one run of an arm."""

    folder: str
    """for its files; all nodes see it"""
    arm: str | None = None
    """hash of the strategy; None: the race"""
    seed: int = 0
    limit_s: float | None = None
    """longest duration of the run"""


Do = Callable[[Step], None]


@dataclass(frozen=True)
class Work:
    """The work of a trial on the ranks of this process, step by step."""

    proposal: Proposal
    agent: Agent
    train: Train
    model: Model

    def do(self, step: Step) -> None:
        """Race the arms, or train one.

        Raises:
            RunFailed, UserError: of the ranks.
        """
        if step.arm is None:
            self._race(Path(step.folder))
        else:
            (arm,) = (arm for arm in self.proposal.arms if arm.hash == step.arm)
            train_run(self.plan(arm, step.seed), Path(step.folder), limit_s=step.limit_s)

    def plan(self, arm: Candidate, seed: int) -> RunPlan:
        """Return the training run of an arm, named by its hash."""
        return RunPlan(arm.hash, seed, arm.strategy, self.train, self.model, DATA)

    def _race(self, folder: Path) -> None:
        proposal, agent = self.proposal, self.agent
        rule = RaceRule.of(agent.budget, proposal.repetitions)
        arms = {arm.hash: arm.strategy for arm in proposal.arms}
        timing = Timing(
            runs=tuple(arms),
            world_size=agent.world_size or self.train.world_size,
            link=agent.link or self.train.link,
            repetitions=rule.repetitions,
        )
        name = f"round-{proposal.round}"
        plan = TimingPlan(name, timing, {**arms}, self.train, self.model, DATA, kind="race")

        def look(step_ms: dict[str, list[float]]) -> RaceDecision:
            return decide_race(step_ms, proposal.incumbent, rule)

        race(plan, folder / "race.json", look, proposal.race_limit_s)


def main(params: Sections, number: str, start: str = "", step: str = "") -> None:
    """Write trial.json of the round, and runs/ with the files of its training runs in the layout
    of results/.

    What fails is a result like any other, of which trial.json alone speaks.

    Args:
        start: command that starts ranks, such as srun -n 8; empty: forks.
        step: the part of the trial to do, as JSON; empty: all.
    """
    refuse_other_source(params)
    refuse_other_tokens(params)
    agent, folder = params(f"rounds.{number}.agent", Agent), Path("results/rounds", number)
    path, fix = folder / "proposal.json", f"run shardlab propose {number}"
    proposal = Proposal.from_file(path, fix)
    train, model = params("train", Train), params("model", Model)
    seeds = params("seeds", list[int])
    if proposal.settings != TrialSettings.of(train, model, seeds):
        raise UserError(f"{path}: of other parameters, as with --set: {fix}")
    work = Work(proposal, agent, train, model)
    if step:
        _report_failure(work, Step.model_validate_json(step))
        return
    command = [sys.executable, "-m", "shardlab", "trial", number, *params.arguments]
    do = partial(_start, [*shlex.split(start), *command]) if start else work.do
    elapsed = stopwatch()
    raced: Race | None = None
    trained: list[AnyResult] = []
    # all nodes see it
    with unfinished(folder / "trial") as scratch:
        runs = scratch / "runs"
        runs.mkdir()
        if proposal.arms:
            raced = _raced(proposal, do, scratch)
            train_arm = partial(measure, work, do, runs)
            trained += train_promising(raced, proposal, work.agent, seeds, train_arm)
        with atomic(folder / "runs") as finished:
            # until the new one is there, no trial looks finished
            (folder / "trial.json").unlink(missing_ok=True)
            runs.rename(finished)
    trial = Trial(round=int(number), race=raced, results=trained, seconds=elapsed())
    trial.to_file(folder / "trial.json")
    reason = raced.reason if raced else f"nothing was raced: {proposal.verdict.reason}"
    say(f"trial {number}: {reason}")


def _start(command: list[str], step: Step) -> None:
    """Do the step on the ranks that the command starts.

    Args:
        command: this stage, after what starts a process for each rank.

    Raises:
        RunFailed, UserError: of the ranks.
    """
    program = [*command, "--step", step.model_dump_json()]
    done = subprocess.run(program, stderr=subprocess.PIPE, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        if (failed := Path(step.folder, _FAILED)).exists():
            kind, arguments = read_json(failed)
            raise _ERRORS[kind](*arguments)
        said = done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}"
        raise RunFailed("crash", said, said.splitlines()[-1])


def _report_failure(work: Work, step: Step) -> None:
    """Do the step, and leave its failure to the stage that started it."""
    try:
        work.do(step)
    except (RunFailed, UserError) as error:
        path = Path(step.folder, _FAILED)
        if not path.exists() or not (isinstance(error, RunFailed) and error.is_consequence):
            write_json(path, [type(error).__name__, error.args])
        raise


def _raced(proposal: Proposal, do: Do, folder: Path) -> Race:
    """Return the race; without runs where ranks failed and no arm is to blame.

    Args:
        folder: for the file of the race.
    """
    elapsed = stopwatch()
    try:
        do(Step(folder=str(folder)))
        result = Race.from_file(folder / "race.json", "repeat the trial")
    except RunFailed as error:
        result = Race(
            name=f"round-{proposal.round}",
            incumbent=proposal.incumbent,
            reason=f"the race failed: {error.summary}",
            seconds=elapsed(),
            runs=[],
        )
    reason = result.reason
    for arm in proposal.arms:
        reason = reason.replace(arm.hash, arm.label)
    return result.model_copy(update={"reason": reason})


def measure(
    work: Work, do: Do, runs: Path, arm: Candidate, seed: int, left_s: float
) -> TrainResult | Failure:
    """Return the record of a training run, whose files stay in `runs`; or its failure, of which
    none stays."""
    plan, limit_s = work.plan(arm, seed), work.proposal.training_limit_s
    if left_s <= 0:
        late = f"{limit_s:.0f} s were over before seed {seed}: raise agent.trial_timeout_s"
        return _of_round(failure(plan, plan.run, "timeout", late), work)
    folder = runs / "train" / plan.run / f"seed{seed}"
    folder.mkdir(parents=True)
    try:
        do(Step(folder=str(folder), arm=arm.hash, seed=seed, limit_s=left_s))
        return _of_round(evaluated(plan, runs), work)
    except RunFailed as error:
        outcome, detail = error.kind, error.detail
    except StorageError:
        raise  # no property of the strategy: a rerun tries it again
    except UserError as error:  # not chosen by a user, so a refusal is data
        outcome, detail = "crash", str(error)
    shutil.rmtree(folder)
    return _of_round(failure(plan, plan.run, outcome, detail[-_LONGEST_DETAIL:]), work)


def _of_round(result: T, work: Work) -> T:
    update = {"kind": "trial", "timing": f"round-{work.proposal.round}"}
    return result.model_copy(update=update)


def evaluated(plan: RunPlan, runs: Path) -> TrainResult:
    """Return the record of a run from its files, after what the stages validate and profile do.

    Args:
        runs: folder with train/, for validate/ and profile/.
    """
    run, seed = plan.run, plan.seed
    validate_seed(runs, run, seed, plan.train, plan.model)
    break_down(runs, run, seed)
    files = (
        f"train/{run}/seed{seed}/metrics",
        f"profile/{run}/seed{seed}",
        f"validate/{run}/seed{seed}",
    )
    parts = (read_json(runs / f"{file}.json", "repeat the trial") for file in files)
    return validate(TrainResult, {key: part[key] for part in parts for key in part}, str(runs))
