"""After a race: train what was faster and may be worse, then accept or roll back.

Every strategy of a race is compared, the controls, too: the fastest admissible one is held, whoever
proposed it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from shardlab.config.contention import warnings_of
from shardlab.config.run_record import Record
from shardlab.config.schema import Agent
from shardlab.config.timing_record import NO_COMMUNICATION, Arm, Race
from shardlab.core.errors import UserError
from shardlab.core.progress import stopwatch
from shardlab.search.history import History, Numerics, mean_ratio, paired_steps
from shardlab.search.race_rule import RaceRule, Standing, standings
from shardlab.search.records import (
    Candidate,
    Comparison,
    Decision,
    Failure,
    Measured,
    Outcome,
    Proposal,
    StepRatio,
    TrainingRun,
    Trial,
)

_LONGEST_DETAIL = 4000
_LOSSES_DIFFER = 1e-3
"""relative difference of losses that the order of sums does not explain"""


def step_times(race: Race) -> dict[str, list[float]]:
    """Return the step times of the arms that are ok, by hash."""
    return {run.run: run.step_ms for run in race.runs if run.run != NO_COMMUNICATION}


class TrialFailed(Exception):
    """A training run that ended without figures; becomes data of the trial."""

    def __init__(
        self, kind: Literal["timeout", "crash", "memory", "diverged"], detail: str
    ) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail


Measure = Callable[[Candidate, int, float], Record]
"""measures one seed: (strategy, seed, seconds left); may raise TrialFailed"""


def train_promising(
    race: Race, proposal: Proposal, agent: Agent, seeds: Sequence[int], measure: Measure
) -> list[Measured]:
    """Train what may replace the incumbent, the fastest first, until a quality is tolerated.

    Challengers may replace it that are faster, and all where it does not fit in memory.

    Returns:
        rows for the table of measurements.
    """
    arms = {arm.hash: arm for arm in proposal.arms}
    known = standings(step_times(race), race.incumbent, RaceRule.of(agent))
    promising = [key for key, state in known.items() if state.faster or not proposal.fits]
    rows: list[Measured] = []
    for key in sorted(promising, key=lambda key: (float(known[key].ratio), key)):
        if arms[key].has_quality:
            break
        rows.append(_train(arms[key], proposal, agent, seeds, measure))
        if mean_ratio(rows[-1].trained, proposal.reference) <= 1 + agent.quality_tolerance:
            break
    return rows


def _train(
    arm: Candidate, proposal: Proposal, agent: Agent, seeds: Sequence[int], measure: Measure
) -> Measured:
    """Return the training runs of a strategy, within `agent.trial_timeout_s` for all seeds."""
    elapsed, limit_s = stopwatch(), agent.trial_timeout_s
    runs: list[TrainingRun] = []
    failures = []
    try:
        for seed in seeds:
            left_s = limit_s - elapsed()
            if left_s <= 0:
                raise TrialFailed("timeout", f"{limit_s:g} s were over before seed {seed}")
            record = measure(arm, seed, left_s)
            if record.divergence is not None:
                raise TrialFailed("diverged", f"seed {seed}: {record.divergence}")
            runs.append(TrainingRun.of(record))
    except TrialFailed as failure:
        failures = [_failure(proposal, failure.kind, failure.detail[-_LONGEST_DETAIL:])]
    return Measured(
        strategy=arm.strategy,
        hash=arm.hash,
        source=f"round {proposal.round}",
        trained=[] if failures else runs,
        failures=failures,
    )


def _failure(proposal: Proposal, outcome: Outcome, detail: str) -> Failure:
    load = proposal.workload
    return Failure(
        source=f"round {proposal.round}",
        link=load.link,
        world_size=load.world_size,
        outcome=outcome,
        detail=detail,
    )


def conclude(history: History, proposal: Proposal, trial: Trial, agent: Agent) -> History:
    """Return the history after a round: everything that was measured, and what is held.

    Args:
        history: before; the proposal says what is held, since it knows the memory limit.

    Raises:
        UserError: the trial is not of the proposal.
    """
    race = trial.race
    if (race is None) != (not proposal.arms) or (race and race.incumbent != proposal.incumbent):
        raise UserError(
            f"round {proposal.round}: the trial is not of its proposal: run the trial again"
        )
    history = history.model_copy(update={"incumbent": proposal.incumbent})
    outcome: dict[str, object] = {
        "decision": "none",
        "reason": f"nothing was raced: {proposal.verdict.reason}",
        "held": history.incumbent,
        "fits": proposal.fits,
    }
    if race is not None:
        history = history.model_copy(update={"measured": _with_trained(history, trial)})
        measured, races = _with_race(history, proposal, race), [*history.races, race]
        history = history.model_copy(update={"measured": measured, "races": races})
        incumbent = race.arms.get(proposal.incumbent)
        if incumbent is not None and incumbent.outcome != "ok":
            outcome = _fall_back(history, proposal, incumbent, agent)
        else:
            outcome = _decide(history, proposal, race, agent)
    decision = Decision.model_validate(
        {
            "round": proposal.round,
            "search": history.search,
            "link": history.workload.link,
            "world_size": history.workload.world_size,
            "verdict": proposal.verdict,
            "space": proposal.space,
            "candidates": proposal.candidates,
            "stopped": race.reason if race else "",
            "seconds": trial.seconds,
            **outcome,
        }
    )
    rounds = [*history.rounds, decision]
    return history.model_copy(update={"incumbent": decision.held, "rounds": rounds})


def _with_trained(history: History, trial: Trial) -> dict[str, Measured]:
    """Return the table with the training runs of a round."""
    measured = dict(history.measured)
    for row in trial.trained:
        known = measured.get(row.hash, row)
        failures = known.failures if known is row else [*known.failures, *row.failures]
        update = {"trained": row.trained, "failures": failures}
        measured[row.hash] = known.model_copy(update=update)
    return measured


def _with_race(history: History, proposal: Proposal, race: Race) -> dict[str, Measured]:
    """Return the table with the steps of all arms, over those of the start, and with failures."""
    times, measured = step_times(race), dict(history.measured)
    source, load = f"round {proposal.round}", history.workload
    for arm in proposal.arms:
        raced = race.arms.get(arm.hash)
        if raced is None:
            continue
        new = Measured(strategy=arm.strategy, hash=arm.hash, source=source)
        row = measured.get(arm.hash, new)
        outcome, detail = raced.outcome, raced.detail
        if outcome == "ok" and not _losses_agree(arm, race, history):
            # no later choice among what was measured may hold it either
            outcome = "crash"
            detail = "its losses are not those of the start, which should compute the same"
        if outcome != "ok":
            failure = _failure(proposal, outcome, detail)
            row = row.model_copy(update={"failures": [*row.failures, failure]})
        elif arm.hash in times and history.start in times:
            steps = paired_steps(
                times[arm.hash], times[history.start], source, load.link, load.world_size
            )
            row = row.model_copy(update={"steps": [*row.steps, steps]})
        measured[arm.hash] = row
    return measured


def _losses_agree(arm: Candidate, race: Race, history: History) -> bool:
    """Return whether an arm that should compute what the start computes did so in the race."""
    start = race.arms.get(history.start)
    if start is None or Numerics.of(arm.strategy) != Numerics.of(history.reference.strategy):
        return True
    pairs = zip(race.arms[arm.hash].losses, start.losses, strict=False)
    return all(
        one is not None and other is not None and abs(one - other) <= _LOSSES_DIFFER * abs(other)
        for one, other in pairs
    )


def _fall_back(
    history: History, proposal: Proposal, failed: Arm, agent: Agent
) -> dict[str, object]:
    """Hold the best that is known in place of an incumbent that failed."""
    limit = proposal.memory_limit_bytes
    best = history.fastest(agent.quality_tolerance, limit, proposal.peaks)
    return {
        "decision": "reject",
        "reason": f"the incumbent ended with outcome {failed.outcome}: {failed.detail}; "
        f"{best.strategy.label()} is held in its place",
        "held": best.hash,
        "fits": history.fits(best, limit, proposal.peaks),
    }


def _decide(history: History, proposal: Proposal, race: Race, agent: Agent) -> dict[str, object]:
    compared = _compare(history, proposal, race, agent)
    contention = ((f"race of round {proposal.round}", run.contention) for run in race.runs)
    facts = {"compared": compared, "warnings": warnings_of(contention)}
    ratios = {c.hash: c.step.ratio for c in compared if c.step and not c.objections}
    if not ratios:
        reason = "; ".join(f"{c.label}: {', '.join(c.objections)}" for c in compared)
        return facts | {
            "decision": "reject",
            "reason": reason or race.reason,
            "held": history.incumbent,
            "fits": proposal.fits,
        }
    best = min(ratios, key=lambda key: (ratios[key], key))
    (chosen,) = (comparison for comparison in compared if comparison.hash == best)
    instead = f"; the incumbent's peak memory is above {_limit(proposal)}"
    return facts | {
        "decision": "accept",
        "reason": f"{chosen.label}: {_figures(chosen)}{'' if proposal.fits else instead}",
        "held": best,
    }


def _compare(history: History, proposal: Proposal, race: Race, agent: Agent) -> list[Comparison]:
    known = standings(step_times(race), race.incumbent, RaceRule.of(agent))
    compared = []
    for arm in proposal.arms:
        if arm.hash == proposal.incumbent or arm.hash not in race.arms:
            continue
        standing, row, raced = known.get(arm.hash), history.measured[arm.hash], race.arms[arm.hash]
        quality = history.quality(arm.strategy)
        compared.append(
            Comparison(
                hash=arm.hash,
                label=arm.label,
                roles=arm.roles,
                outcome=raced.outcome,
                step=standing and _step(standing, proposal),
                predicted_ms=arm.prediction.step_ms,
                perplexity_ratio=quality.ratio if quality and quality.ratio < math.inf else None,
                memory_peak_bytes=max((run.memory_peak_bytes for run in row.trained), default=None),
                objections=_objections(
                    row, race.arms[arm.hash], standing, history, proposal, agent
                ),
            )
        )
    return compared


def _step(standing: Standing, proposal: Proposal) -> StepRatio:
    load = proposal.workload
    return StepRatio(
        source=f"round {proposal.round}",
        link=load.link,
        world_size=load.world_size,
        ratio=float(standing.ratio),
        low=float(standing.low),
        high=float(standing.high),
        repetitions=standing.repetitions,
    )


def _objections(
    row: Measured,
    raced: Arm,
    standing: Standing | None,
    history: History,
    proposal: Proposal,
    agent: Agent,
) -> list[str]:
    """Return all that speaks against holding an arm."""
    if raced.outcome != "ok" or standing is None:
        return [f"it ended with outcome {raced.outcome}: {raced.detail}".removesuffix(": ")]
    if not standing.faster and proposal.fits:
        return ["no gain in step time is shown" if standing.low < 1 else "it is slower"]
    objections = []
    quality, tolerance = history.quality(row.strategy), agent.quality_tolerance
    failure = row.failure(history.workload)
    if failure is not None:
        objections.append(f"its trial ended with outcome {failure.outcome}: {failure.detail}")
    elif quality is None or not quality.sure:
        objections.append("its perplexity was not measured")
    elif not quality.ratio <= 1 + tolerance:
        trained = f" (seeds trained: {len(row.trained)})" if row.trained else ""
        objections.append(f"perplexity is above {1 + tolerance:.3f} times the start's{trained}")
    if not history.fits(row, proposal.memory_limit_bytes, {}):
        objections.append(f"peak memory is above {_limit(proposal)}")
    return objections


def _figures(best: Comparison) -> str:
    step = best.step
    assert step is not None, "it was compared"
    return (
        f"step {step.ratio:.3f} times the incumbent's (95 % of searches {step.low:.3f} to "
        f"{step.high:.3f}, {step.repetitions} repetitions), perplexity "
        f"{best.perplexity_ratio:.3f} times the start's"
    )


def _limit(proposal: Proposal) -> str:
    return f"{proposal.memory_limit_bytes / 1e6:.0f} MB"
