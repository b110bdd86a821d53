"""Race the arms of a round, then train what was faster and of which the quality is unknown."""

from pathlib import Path

from shardlab.agent.decisions.decision import faster, race_rule
from shardlab.agent.races.sequential import verdict
from shardlab.agent.records.history import mean_ratio
from shardlab.agent.records.rounds import Arm, Measurement, Proposal, Trained, Trial
from shardlab.agent.trials.trials import TrialFailed, run_trial, trial_key
from shardlab.core.checksums import read_checked, refuse_damage
from shardlab.core.document import validate
from shardlab.core.errors import StorageError, UserError
from shardlab.core.progress import say, stopwatch
from shardlab.core.unfinished import temporary
from shardlab.evaluation.validate import validate_run
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Timing
from shardlab.launch import RunFailed
from shardlab.loop.plan import RunPlan
from shardlab.profiling.analysis.breakdown import analyse
from shardlab.records.race import Race, Ruling
from shardlab.records.run import Record
from shardlab.timing.plan import TimingPlan
from shardlab.timing.race import race
from shardlab.train.run import train_run
from stages import plans
from stages.common import integer, run
from stages.plans import Values

DATA = Path("data")
STORE = Path(".trials")


def main(params: Parameters, number: str) -> None:
    """Write trial.json of the round; what fails is a result like any other."""
    count, folder = integer("round", number), Path("results/rounds", number)
    fix = f"run python -m stages.propose {number}"
    proposal = Proposal.from_file(folder / "proposal.json", fix)
    plan = plans.trial(params, number)
    elapsed = stopwatch()
    raced = _race(plan, proposal) if proposal.arms else None
    trained = _train(plan, proposal, raced) if raced else []
    trial = Trial(round=count, race=raced, trained=trained, seconds=elapsed())
    trial.to_file(folder / "trial.json")
    say(f"round {number}: {raced.reason if raced else 'nothing was raced'}")


def _race(values: Values, proposal: Proposal) -> Race:
    agent, train = values["agent"], values["train"]
    arms = {arm.hash: arm.strategy for arm in proposal.arms}
    timing = Timing(
        runs=tuple(arms),
        world_size=agent.world_size or train.world_size,
        link=agent.link or train.link,
        repetitions=agent.repetitions,
    )
    plan = TimingPlan(f"round-{proposal.round}", timing, {**arms}, train, values["model"], DATA)
    rule, elapsed = race_rule(agent), stopwatch()

    def look(step_ms: dict[str, list[float]]) -> Ruling:
        return verdict(step_ms, proposal.incumbent, rule, elapsed()).ruling

    with temporary("shardlab-race") as folder:
        race(plan, folder / "race.json", look, agent.trial_timeout_s)
        found = Race.from_file(folder / "race.json", "repeat the trial")
    reason = found.reason
    for arm in proposal.arms:
        reason = reason.replace(arm.hash, arm.label)
    return found.model_copy(update={"reason": reason})


def _train(values: Values, proposal: Proposal, raced: Race) -> list[Trained]:
    """Train the faster arms, the fastest first, until one has a quality that is tolerated."""
    agent, arms = values["agent"], {arm.hash: arm for arm in proposal.arms}
    trained: list[Trained] = []
    for key in faster(raced, agent):
        if arms[key].trained:
            break
        trained.append(_trained(values, arms[key]))
        ratio = mean_ratio(trained[-1].measurements, proposal.reference)
        if ratio <= 1 + agent.quality_tolerance:
            break
    return trained


def _trained(values: Values, arm: Arm) -> Trained:
    agent, train, model, seeds = (values[key] for key in ("agent", "train", "model", "seeds"))

    def measure_seed(seed: int, folder: Path, left_s: float) -> Record:
        plan = RunPlan(f"trial-{arm.hash}", seed, arm.strategy, train, model, DATA)
        try:
            record = measure(plan, folder, left_s)
        except RunFailed as failure:
            raise TrialFailed(failure.kind, failure.detail) from failure
        except StorageError:
            raise  # no property of the strategy: a rerun tries it again
        except UserError as error:  # not chosen by a user, so a refusal is data
            raise TrialFailed("crash", str(error)) from error
        if record.divergence is not None:
            raise TrialFailed("diverged", f"seed {seed}: {record.divergence}")
        return record

    key = trial_key(arm.strategy, train, model, seeds, DATA / "tokens/manifest.json")
    found = run_trial(arm.strategy, key, seeds, agent.trial_timeout_s, STORE, measure_seed)
    return Trained(
        hash=arm.hash,
        outcome=found.outcome,
        detail=found.detail,
        measurements=[Measurement.of(record) for record in found.records],
    )


def measure(plan: RunPlan, folder: Path, timeout_s: float | None = None) -> Record:
    """Run `plan` in child processes and return its record; files are left in `folder`.

    Raises:
        RunFailed: crash, lack of memory, or more than `timeout_s` seconds of training.
    """
    train_run(plan, folder, limit_s=timeout_s)
    quality = folder / "validation.json"
    fix = "repeat the trial"
    metrics = read_checked(folder / "metrics.json", fix)
    refuse_damage(folder, metrics.pop("files"), fix)
    validate_run(folder / "final_model", quality, plan.train, plan.model, plan.seed, plan.data)
    return validate(
        Record,
        {
            **metrics,
            **analyse(folder / "trace.json.gz").model_dump(),
            **read_checked(quality, fix),
        },
        str(folder),
    )


if __name__ == "__main__":
    run(main)
