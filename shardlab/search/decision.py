"""Accept or roll back: what replaces the incumbent was faster in a race, and is as good.

Every strategy of a race is compared, the controls, too: the fastest admissible one is held, whoever
proposed it.
"""

import math
from collections.abc import Mapping, Sequence

from shardlab.config.contention import warnings_of
from shardlab.config.race_record import Arm as RacedArm
from shardlab.config.race_record import Race
from shardlab.config.search import Agent
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.core.errors import UserError
from shardlab.search.history import History, Measured, paired_steps
from shardlab.search.numerics import Numerics
from shardlab.search.rounds import (
    Arm,
    Comparison,
    Decision,
    Proposal,
    Round,
    StepRatio,
    Trained,
    Trial,
)
from shardlab.search.sequential import RaceRule, Standing, verdict

_LARGEST_RACE = 4
"""challengers: the start, the judge's choice, the forecast's and a random one"""
_LOSSES_DIFFER = 1e-3
"""relative difference of losses that the order of sums does not explain"""


def race_rule(agent: Agent) -> RaceRule:
    """Return the rule of each race, such that its errors hold over the whole search."""
    # an attempt of a race has half of the time that is left
    limits = {"most": agent.repetitions, "budget_s": agent.trial_timeout_s / 3}
    return RaceRule.of_search(_LARGEST_RACE * agent.budget, **limits)


def step_times(race: Race) -> dict[str, list[float]]:
    """Return the step times of the arms that are ok, by hash."""
    return {run.run: run.step_ms for run in race.runs if run.run != NO_COMMUNICATION}


def standings(race: Race, agent: Agent) -> Mapping[str, Standing]:
    """Return how each challenger of a race stands, by hash."""
    return verdict(step_times(race), race.incumbent, race_rule(agent), race.seconds).standings


def promising(race: Race, proposal: Proposal, agent: Agent) -> list[str]:
    """Return the challengers that may replace the incumbent, the fastest first.

    They are faster, or it does not fit in memory.
    """
    found = standings(race, agent)
    return sorted(
        (key for key, each in found.items() if each.verdict == "faster" or not proposal.fits),
        key=lambda key: (found[key].ratio, key),
    )


def with_trained(history: History, proposal: Proposal, trained: Sequence[Trained]) -> History:
    """Return the history with the training runs of a round."""
    measured = dict(history.measured)
    arms = {arm.hash: arm for arm in proposal.arms}
    for each in trained:
        entry = measured.get(each.hash) or _entry(arms[each.hash], proposal.round)
        measured[each.hash] = entry.model_copy(
            update={
                "outcome": each.outcome,
                "detail": each.detail,
                "measurements": each.measurements,
            }
        )
    return history.model_copy(update={"measured": measured})


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
    if race is None:
        decision = Decision(
            decision="none",
            reason=f"nothing was raced: {proposal.verdict.reason}",
            held=history.incumbent,
            fits=proposal.fits,
        )
        return _with_round(history, proposal, trial, decision)
    known = with_trained(history, proposal, trial.trained)
    known = _with_race(known, proposal, race)
    incumbent = race.arms.get(proposal.incumbent)
    if incumbent is not None and incumbent.outcome != "ok":
        decision = _fall_back(known, proposal, incumbent, agent)
    else:
        decision = _decide(known, proposal, trial, _compare(known, proposal, race, agent))
    return _with_round(known, proposal, trial, decision)


def _fall_back(history: History, proposal: Proposal, failed: RacedArm, agent: Agent) -> Decision:
    """Hold the best that is known in place of an incumbent that failed."""
    limit = proposal.memory_limit_bytes
    best = history.fastest(agent.quality_tolerance, limit, proposal.peaks)
    return Decision(
        decision="reject",
        reason=f"the incumbent ended with outcome {failed.outcome}: {failed.detail}; "
        f"{best.strategy.label()} is held in its place",
        held=best.hash,
        fits=history.fits(best, limit, proposal.peaks),
    )


def _compare(history: History, proposal: Proposal, race: Race, agent: Agent) -> list[Comparison]:
    found = standings(race, agent)
    predicted = {each.strategy.hash(): each.prediction.step_ms for each in proposal.candidates}
    compared = []
    for arm in proposal.arms:
        if arm.hash == proposal.incumbent or arm.hash not in race.arms:
            continue
        standing, raced = found.get(arm.hash), race.arms[arm.hash]
        entry, quality = history.measured.get(arm.hash), history.quality(arm.strategy)
        trained = entry.measurements if entry else []
        compared.append(
            Comparison(
                hash=arm.hash,
                label=arm.label,
                roles=arm.roles,
                outcome=raced.outcome,
                step=standing and _ratio(standing, proposal.round),
                predicted_ms=predicted.get(arm.hash),
                perplexity_ratio=quality.ratio if quality and quality.ratio < math.inf else None,
                memory_peak_bytes=max((m.memory_peak_bytes for m in trained), default=None),
                objections=_objections(arm, standing, race, history, proposal, agent),
            )
        )
    return compared


def _objections(
    arm: Arm,
    standing: Standing | None,
    race: Race,
    history: History,
    proposal: Proposal,
    agent: Agent,
) -> list[str]:
    """Return all that speaks against holding an arm."""
    raced, entry = race.arms[arm.hash], history.measured.get(arm.hash)
    if raced.outcome != "ok" or standing is None:
        return [f"it ended with outcome {raced.outcome}: {raced.detail}".removesuffix(": ")]
    found = []
    if standing.verdict != "faster" and proposal.fits:
        found.append("no gain in step time is shown" if standing.low < 1 else "it is slower")
        return found
    quality, tolerance = history.quality(arm.strategy), agent.quality_tolerance
    if entry is not None and entry.outcome != "ok":
        found.append(f"training it ended with outcome {entry.outcome}: {entry.detail}")
    elif quality is None or not quality.sure:
        found.append("its perplexity was not measured")
    elif not quality.ratio <= 1 + tolerance:
        seeds = len(entry.measurements) if entry else 0
        trained = f" (seeds trained: {seeds})" if seeds else ""
        found.append(f"perplexity is above {1 + tolerance:.3f} times the start's{trained}")
    if entry and not history.fits(entry, proposal.memory_limit_bytes, {}):
        found.append(f"peak memory is above {_limit(proposal)}")
    return found


def _losses_agree(arm: Arm, race: Race, history: History) -> bool:
    """Return whether an arm that should compute what the start computes did so in the race."""
    start = race.arms.get(history.start)
    if start is None or Numerics.of(arm.strategy) != Numerics.of(history.reference.strategy):
        return True
    pairs = zip(race.arms[arm.hash].losses, start.losses, strict=False)
    return all(
        one is not None and other is not None and abs(one - other) <= _LOSSES_DIFFER * abs(other)
        for one, other in pairs
    )


def _decide(
    history: History, proposal: Proposal, trial: Trial, compared: Sequence[Comparison]
) -> Decision:
    assert trial.race is not None, "callers have looked"
    admissible = [each for each in compared if each.step and not each.objections]
    warnings = warnings_of(
        (f"race of round {proposal.round}", run.contention) for run in trial.race.runs
    )
    if not admissible:
        reason = "; ".join(f"{each.label}: {', '.join(each.objections)}" for each in compared)
        return Decision(
            decision="reject",
            reason=reason or trial.race.reason,
            held=history.incumbent,
            fits=proposal.fits,
            compared=[*compared],
            warnings=warnings,
        )
    best = min(admissible, key=lambda each: (each.step.ratio, each.hash))  # type: ignore[union-attr]
    return Decision(
        decision="accept",
        reason=f"{best.label}: {_figures(best)}{_instead(proposal)}",
        held=best.hash,
        compared=[*compared],
        warnings=warnings,
    )


def _figures(best: Comparison) -> str:
    step, quality = best.step, best.perplexity_ratio
    assert step is not None, "it was compared"
    return (
        f"step {step.ratio:.3f} times the incumbent's (95 % of searches {step.low:.3f} to "
        f"{step.high:.3f}, {step.repetitions} repetitions), perplexity {quality:.3f} times the "
        "start's"
    )


def _instead(proposal: Proposal) -> str:
    return "" if proposal.fits else f"; the incumbent's peak memory is above {_limit(proposal)}"


def _limit(proposal: Proposal) -> str:
    return f"{proposal.memory_limit_bytes / 1e6:.0f} MB"


def _ratio(standing: Standing, number: int) -> StepRatio:
    return StepRatio(
        source=f"round {number}",
        ratio=standing.ratio,
        low=standing.low,
        high=standing.high,
        repetitions=standing.repetitions,
    )


def _with_race(history: History, proposal: Proposal, race: Race) -> History:
    """Return the history with the steps of all arms, over those of the start."""
    times, measured = step_times(race), dict(history.measured)
    for arm in proposal.arms:
        raced = race.arms.get(arm.hash)
        if raced is None:
            continue
        entry = measured.get(arm.hash) or _entry(arm, proposal.round)
        if raced.outcome != "ok":
            entry = entry.model_copy(update={"outcome": raced.outcome, "detail": raced.detail})
        elif not _losses_agree(arm, race, history):
            # no later choice among what was measured may hold it either
            detail = "its losses are not those of the start, which should compute the same"
            entry = entry.model_copy(update={"outcome": "crash", "detail": detail})
        elif arm.hash in times and history.start in times:
            steps = paired_steps(times[arm.hash], times[history.start], f"round {proposal.round}")
            entry = entry.model_copy(update={"steps": [*entry.steps, steps]})
        measured[arm.hash] = entry
    return history.model_copy(update={"measured": measured, "races": [*history.races, race]})


def _entry(arm: Arm, number: int) -> Measured:
    return Measured(strategy=arm.strategy, hash=arm.hash, source=f"round {number}")


def _with_round(history: History, proposal: Proposal, trial: Trial, decision: Decision) -> History:
    done = Round(
        round=proposal.round,
        search=history.search,
        verdict=proposal.verdict,
        space=proposal.space,
        candidates=proposal.candidates,
        stopped=trial.race.reason if trial.race else "",
        seconds=trial.seconds,
        **dict(decision),
    )
    return history.model_copy(
        update={"incumbent": decision.held, "rounds": [*history.rounds, done]}
    )
