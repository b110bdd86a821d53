"""Measure the proposed strategy of a round, once for each seed."""

from pathlib import Path

from shardlab.agent.records.rounds import Proposal, Trial
from shardlab.agent.trials.trials import TrialFailed, run_trial, trial_key
from shardlab.core.document import validate
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.core.progress import say
from shardlab.evaluation.validate import validate_run
from shardlab.experiment.parameters import Parameters
from shardlab.launch import RunFailed
from shardlab.loop.plan import RunPlan
from shardlab.profiling.analysis.breakdown import analyse
from shardlab.records.run import Record
from shardlab.strategy.strategy import Strategy
from shardlab.train.run import train_run
from stages.common import integer, run

DATA = Path("data")
STORE = Path(".trials")


def main(params: Parameters, number: str) -> None:
    """Write trial.json of the round; a failed trial is a result like any other."""
    folder = Path("results/rounds", str(integer("round", number)))
    proposal = Proposal.from_file(folder / "proposal.json")
    if proposal.chosen is None:
        trial = Trial(outcome="none", detail=proposal.verdict.reason)
    else:
        trial = _trial(params, proposal.chosen)
    trial.to_file(folder / "trial.json")
    say(f"round {number}: trial ended with outcome {trial.outcome}")


def _trial(params: Parameters, strategy: Strategy) -> Trial:
    agent, train, model, seeds = params("agent", "train", "model", "seeds")

    def measure_seed(seed: int, folder: Path, left_s: float) -> Record:
        plan = RunPlan(f"trial-{strategy.hash()}", seed, strategy, train, model, DATA)
        try:
            return measure(plan, folder, left_s)
        except RunFailed as failure:
            raise TrialFailed(failure.kind, failure.detail) from failure
        except UserError as error:  # not chosen by a user, so a refusal is data
            raise TrialFailed("crash", str(error)) from error

    key = trial_key(strategy, train, model, seeds, DATA / "tokens/manifest.json")
    return run_trial(strategy, key, seeds, agent.trial_timeout_s, STORE, measure_seed)


def measure(plan: RunPlan, folder: Path, timeout_s: float | None = None) -> Record:
    """Run `plan` in child processes and return its record; files are left in `folder`.

    Raises:
        RunFailed: crash, lack of memory, or more than `timeout_s` seconds of training.
    """
    train_run(plan, folder, limit_s=timeout_s)
    quality = folder / "validation.json"
    validate_run(folder / "final_model", quality, plan.train, plan.model, plan.seed, plan.data)
    return validate(
        Record,
        {
            **read_json(folder / "metrics.json"),
            **analyse(folder / "trace.json.gz").model_dump(),
            **read_json(quality),
        },
        str(folder),
    )


if __name__ == "__main__":
    run(main)
