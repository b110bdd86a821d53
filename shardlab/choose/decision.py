"""Decision after a race: train faster strategies that may be worse, then accept one or none.

The rule of `shardlab.choose.rank` ranks every strategy of a race, controls included. The first one
is the next incumbent. Only a strategy that is shown to be faster replaces the incumbent.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from shardlab.choose.history import History, Numerics, PerplexityRatio, mean_ratio
from shardlab.choose.incumbent import best_measured, option_of
from shardlab.choose.race_rule import RaceRule, StepComparison, compare_steps, intervals
from shardlab.choose.rank import Ranking, is_tolerated, rank
from shardlab.choose.records import (
    Candidate,
    Comparison,
    Decision,
    Proposal,
    Trial,
)
from shardlab.choose.settings import Agent
from shardlab.core.errors import UserError
from shardlab.core.progress import stopwatch
from shardlab.results.contention import warnings_of
from shardlab.results.interval import Ratio
from shardlab.results.result import Failure, only
from shardlab.results.table import StepRatio
from shardlab.results.timing_result import NO_COMMUNICATION, Race, TimingResult
from shardlab.results.train_result import TrainResult

_LOSSES_DIFFER = 1e-3
"""Relative difference of losses that the order of sums does not explain."""

Measure = Callable[[Candidate, int, float], TrainResult | Failure]
"""Trains one seed of an arm: (arm, seed, seconds left); the seconds may be 0 or less."""


def _compare_steps(race: Race, proposal: Proposal, agent: Agent) -> dict[str, StepComparison]:
    times = {run.run: run.step_ms for run in race.runs if run.run != NO_COMMUNICATION}
    return compare_steps(times, race.incumbent, RaceRule.of(agent.budget, proposal.repetitions))


def train_promising(
    race: Race, proposal: Proposal, agent: Agent, seeds: Sequence[int], measure: Measure
) -> list[TrainResult | Failure]:
    """Train challengers that may replace the incumbent, the fastest first, until one has training
    runs and a tolerated quality: the next incumbent needs a model, a loss curve and a trace.

    A faster challenger may replace the incumbent, and every challenger may where the incumbent does
    not fit in memory.
    """
    arms = {arm.hash: arm for arm in proposal.arms}
    steps = _compare_steps(race, proposal, agent)
    promising = [key for key, step in steps.items() if step.faster or not proposal.fits]
    results: list[TrainResult | Failure] = []
    for key in sorted(promising, key=lambda key: (float(steps[key].ratio), key)):
        if arms[key].trained:
            break
        runs = _train(arms[key], proposal, seeds, measure)
        results += runs
        trained = only(runs, TrainResult)
        complete = len(trained) == len(runs) and trained[-1].divergence is None
        quality = PerplexityRatio(mean_ratio(trained, proposal.reference), "its own")
        if complete and is_tolerated(quality.perplexity, agent.quality_tolerance):
            break
    return results


def _train(
    arm: Candidate, proposal: Proposal, seeds: Sequence[int], measure: Measure
) -> list[TrainResult | Failure]:
    """Return the training runs of a strategy, up to the first that fails or diverges, within the
    time limit of the proposal for all seeds."""
    elapsed = stopwatch()
    runs: list[TrainResult | Failure] = []
    for seed in seeds:
        run = measure(arm, seed, proposal.training_limit_s - elapsed())
        runs.append(run)
        if isinstance(run, Failure) or run.divergence is not None:
            break
    return runs


def conclude(history: History, proposal: Proposal, trial: Trial, agent: Agent) -> History:
    """Return the history after a round, with its measurements and its decision.

    Args:
        history: state before the round; the proposal, which knows the memory limit, names the
            incumbent.

    Raises:
        UserError: the trial is not of the proposal.
    """
    race = trial.race
    if (race is None) != (not proposal.arms) or (race and race.incumbent != proposal.incumbent):
        raise UserError(
            f"round {proposal.round}: the trial is not of its proposal: run the trial again"
        )
    if race is not None:
        history = history.with_results([*trial.results, *_raced(history, proposal, race)])
    history = history.model_copy(update={"incumbent": proposal.incumbent})
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
            "held": history.incumbent,
            "fits": proposal.fits,
            **_decide(history, proposal, race, agent),
        }
    )
    rounds = [*history.rounds, decision]
    return history.model_copy(update={"incumbent": decision.held, "rounds": rounds})


def _raced(history: History, proposal: Proposal, race: Race) -> list[TimingResult | Failure]:
    """Return the results of a race in the order of its arms.

    An arm that should compute what the start computes, and has other losses, becomes a failure, so
    that no later round chooses it.
    """
    arms = {arm.hash: arm for arm in proposal.arms}
    losses = {run.run: run.losses for run in race.runs}
    results: list[TimingResult | Failure] = [*race.failures]
    for run in race.runs:
        arm = arms.get(run.run)
        if arm is None or _losses_agree(arm, losses, history):
            results.append(run)
            continue
        detail = "its losses are not those of the start, which should compute the same"
        results.append(Failure(**run.header(), outcome="crash", detail=detail))
    order = [*arms, NO_COMMUNICATION]
    return sorted(results, key=lambda result: order.index(result.run))


def _losses_agree(
    arm: Candidate, losses: Mapping[str, Sequence[float | None]], history: History
) -> bool:
    """Return whether an arm that should compute what the start computes did so in the race."""
    start = losses.get(history.start)
    if start is None or Numerics.of(arm.strategy) != Numerics.of(history.start_results.strategy):
        return True
    pairs = zip(losses[arm.hash], start, strict=False)
    return all(
        loss is not None
        and expected is not None
        and abs(loss - expected) <= _LOSSES_DIFFER * expected
        for loss, expected in pairs
    )


def _decide(
    history: History, proposal: Proposal, race: Race | None, agent: Agent
) -> dict[str, Any]:
    """Return the fields of a decision that depend on the race."""
    if race is None:
        reason = f"nothing was raced: {proposal.verdict.reason}"
        return {"decision": "none", "reason": reason}
    limit = proposal.memory_limit_bytes
    failure = race.failure(proposal.incumbent)
    if failure is not None:
        best = best_measured(history, agent.quality_tolerance, limit, proposal.peaks)
        return {
            "decision": "reject",
            "reason": f"the incumbent ended with outcome {failure.outcome}: {failure.detail}; "
            f"{best.strategy.label()} is held in its place",
            "held": best.hash,
            "fits": proposal.peaks.get(best.hash, 0) <= limit,
        }
    ranking = _ranking(history, proposal, race, agent)
    compared = _compare(history, proposal, race, agent, ranking)
    contention = ((f"race of round {proposal.round}", run.contention) for run in race.runs)
    fields: dict[str, Any] = {"compared": compared, "warnings": warnings_of(contention)}
    first = ranking.first
    if first is None or first.name == proposal.incumbent:
        reason = "; ".join(f"{arm.label}: {', '.join(arm.objections)}" for arm in compared)
        without_race = f"nothing was raced: {race.reason}"
        return fields | {"decision": "reject", "reason": reason or without_race}
    chosen = next(arm for arm in compared if arm.hash == first.name)
    reason = f"{chosen.label}: {_figures(chosen)}"
    if sum(not arm.objections for arm in compared) > 1:
        reason += f"; {ranking.order[0].reason}"
    if not proposal.fits:
        reason += f"; the incumbent's peak memory is above {limit / 1e6:.0f} MB"
    return fields | {"decision": "accept", "reason": reason, "held": chosen.hash, "fits": True}


def _ranking(history: History, proposal: Proposal, race: Race, agent: Agent) -> Ranking:
    """Rank the incumbent and the challengers that failed neither in the race nor in training, by
    the intervals of the race."""
    rule = RaceRule.of(agent.budget, proposal.repetitions)
    limit = proposal.memory_limit_bytes
    times = {run.run: run.step_ms for run in race.runs if run.run != NO_COMMUNICATION}

    def step_ratio(arm: Hashable, baseline: Hashable) -> Ratio:
        # an arm that left the race has fewer steps
        logs = np.log([*zip(times[str(arm)], times[str(baseline)], strict=False)])
        return Ratio(*map(float, intervals(logs[:, 0] - logs[:, 1], rule)[:3]))

    options = []
    for arm in proposal.arms:
        if not {arm.hash, proposal.incumbent} <= {*times}:
            continue
        row, is_incumbent = history.measured[arm.hash], arm.hash == proposal.incumbent
        if row.failure(history.workload) and not is_incumbent:
            continue
        # the predicted peak of an arm without training runs is within the limit: 0 fits
        peak = row.peak(proposal.workload) or 0
        if is_incumbent:
            peak = 0 if proposal.fits else limit + 1
        step, quality = step_ratio(arm.hash, proposal.incumbent), history.quality(arm.strategy)
        options.append(option_of(arm.strategy, step, quality, peak))
    return rank(
        options,
        [],  # races do not time one device
        agent.quality_tolerance,
        limit,
        lambda option, baseline: step_ratio(option.name, baseline.name),
        in_use=proposal.incumbent,
    )


def _compare(
    history: History, proposal: Proposal, race: Race, agent: Agent, ranking: Ranking
) -> list[Comparison]:
    """Return the challengers of a race, each with the objections to it as the next incumbent."""
    load, steps, compared = proposal.workload, _compare_steps(race, proposal, agent), []
    usable = {ranked.option.name for ranked in ranking.order}
    unusable = {ranked.option.name: ranked.reason for ranked in ranking.apart}
    for arm in proposal.arms:
        step, failed = steps.get(arm.hash), race.failure(arm.hash)
        if arm.hash == proposal.incumbent:
            continue
        quality = history.quality(arm.strategy)
        objections = []
        if failed is not None:
            objections = [f"it ended with outcome {failed.outcome}: {failed.detail}"]
        elif step is None:
            continue  # no race took place
        elif not step.faster and proposal.incumbent in usable:
            objections = ["no gain in step time is shown" if step.low < 1 else "it is slower"]
        elif failure := history.measured[arm.hash].failure(history.workload):
            objections = [f"its trial ended with outcome {failure.outcome}: {failure.detail}"]
        elif arm.hash not in usable:
            runs = history.measured[arm.hash].trained
            seeds = f" (seeds trained: {len(runs)})" if runs else ""
            objections = [f"{unusable[arm.hash]}{seeds}"]
        compared.append(
            Comparison(
                hash=arm.hash,
                label=arm.label,
                roles=arm.roles,
                outcome=failed.outcome if failed else "ok",
                step=step
                and StepRatio(
                    source=f"round {proposal.round}",
                    link=load.link,
                    world_size=load.world_size,
                    **step.figures(),
                ),
                predicted_ms=arm.prediction.step_ms,
                perplexity_ratio=quality.ratio if quality and quality.ratio < math.inf else None,
                objections=objections,
            )
        )
    return compared


def _figures(best: Comparison) -> str:
    step = best.step
    assert step is not None, "an accepted challenger took part in the race"
    return (
        f"step {step.ratio:.3f} times the incumbent's (95 % of searches {step.low:.3f} to "
        f"{step.high:.3f}, {step.repetitions} repetitions), perplexity "
        f"{best.perplexity_ratio:.3f} times the start's"
    )
