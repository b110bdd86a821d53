"""After a race: train what was faster and may be worse, then accept or roll back.

Every strategy of a race is compared, the controls, too: the fastest admissible one is held, whoever
proposed it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardlab.choose.history import History, Numerics, mean_ratio
from shardlab.choose.race_rule import RaceRule, Standing, standings
from shardlab.choose.records import (
    Candidate,
    Comparison,
    Decision,
    Proposal,
    Trial,
)
from shardlab.config.schema import Agent
from shardlab.core.errors import UserError
from shardlab.core.progress import stopwatch
from shardlab.results.contention import warnings_of
from shardlab.results.result import Failure, only
from shardlab.results.table import Measured, StepRatio
from shardlab.results.timing_result import NO_COMMUNICATION, Race, TimingResult
from shardlab.results.train_result import TrainResult

_LOSSES_DIFFER = 1e-3
"""relative difference of losses that the order of sums does not explain"""

Measure = Callable[[Candidate, int, float], TrainResult | Failure]
"""trains one seed of an arm: (arm, seed, seconds left), of which none may be left"""


def _place(proposal: Proposal) -> dict[str, Any]:
    load = proposal.workload
    source = f"round {proposal.round}"
    return {"source": source, "link": load.link, "world_size": load.world_size}


def _standings(race: Race, agent: Agent) -> dict[str, Standing]:
    times = {run.run: run.step_ms for run in race.runs if run.run != NO_COMMUNICATION}
    return standings(times, race.incumbent, RaceRule.of(agent))


def train_promising(
    race: Race, proposal: Proposal, agent: Agent, seeds: Sequence[int], measure: Measure
) -> list[TrainResult | Failure]:
    """Train what may replace the incumbent, the fastest first, until one has records and its
    quality is tolerated: what a round holds in its place has a model, a curve and a trace.

    Challengers may replace it that are faster, and all where it does not fit in memory.
    """
    arms = {arm.hash: arm for arm in proposal.arms}
    known = _standings(race, agent)
    promising = [key for key, state in known.items() if state.faster or not proposal.fits]
    results: list[TrainResult | Failure] = []
    for key in sorted(promising, key=lambda key: (float(known[key].ratio), key)):
        if arms[key].trained:
            break
        runs = _train(arms[key], proposal, seeds, measure)
        results += runs
        trained = only(runs, TrainResult)
        complete = len(trained) == len(runs) and trained[-1].divergence is None
        if complete and mean_ratio(trained, proposal.reference) <= 1 + agent.quality_tolerance:
            break
    return results


def _train(
    arm: Candidate, proposal: Proposal, seeds: Sequence[int], measure: Measure
) -> list[TrainResult | Failure]:
    """Return the training runs of a strategy, within the limit of the proposal for all seeds, until
    one fails or diverges."""
    elapsed = stopwatch()
    runs: list[TrainResult | Failure] = []
    for seed in seeds:
        run = measure(arm, seed, proposal.training_limit_s - elapsed())
        runs.append(run)
        if isinstance(run, Failure) or run.divergence is not None:
            break
    return runs


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
    update: dict[str, Any] = {"incumbent": proposal.incumbent}
    if race is not None:
        history = history.with_results([*trial.results, *_raced(history, proposal, race)])
    history = history.model_copy(update=update)
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
    """Return the results of a race in the order of its arms; a failure for one whose losses are not
    those of the start, though it should compute the same: no later choice may hold it either."""
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
    if start is None or Numerics.of(arm.strategy) != Numerics.of(history.reference.strategy):
        return True
    pairs = zip(losses[arm.hash], start, strict=False)
    return all(
        one is not None and other is not None and abs(one - other) <= _LOSSES_DIFFER * other
        for one, other in pairs
    )


def _decide(
    history: History, proposal: Proposal, race: Race | None, agent: Agent
) -> dict[str, Any]:
    """Return the fields of a decision that depend on the race."""
    if race is None:
        reason = f"nothing was raced: {proposal.verdict.reason}"
        return {"decision": "none", "reason": reason}
    limit = proposal.memory_limit_bytes
    failed = race.failure(proposal.incumbent)
    if failed is not None:
        best = history.fastest(agent.quality_tolerance, limit, proposal.peaks)
        return {
            "decision": "reject",
            "reason": f"the incumbent ended with outcome {failed.outcome}: {failed.detail}; "
            f"{best.strategy.label()} is held in its place",
            "held": best.hash,
            "fits": proposal.peaks.get(best.hash, 0) <= limit,
        }
    compared = _compare(history, proposal, race, agent)
    contention = ((f"race of round {proposal.round}", run.contention) for run in race.runs)
    facts: dict[str, Any] = {"compared": compared, "warnings": warnings_of(contention)}
    better = [arm for arm in compared if arm.step and not arm.objections]
    if not better:
        reason = "; ".join(f"{arm.label}: {', '.join(arm.objections)}" for arm in compared)
        nothing = f"nothing was raced: {race.reason}"
        return facts | {"decision": "reject", "reason": reason or nothing}
    chosen = min(better, key=lambda arm: (arm.step.ratio if arm.step else math.inf, arm.hash))
    reason = f"{chosen.label}: {_figures(chosen)}"
    if not proposal.fits:
        reason += f"; the incumbent's peak memory is above {limit / 1e6:.0f} MB"
    return facts | {"decision": "accept", "reason": reason, "held": chosen.hash, "fits": True}


def _compare(history: History, proposal: Proposal, race: Race, agent: Agent) -> list[Comparison]:
    """Return the challengers of a race, each with all that speaks against holding it."""
    known, compared = _standings(race, agent), []
    for arm in proposal.arms:
        standing, failed = known.get(arm.hash), race.failure(arm.hash)
        if arm.hash == proposal.incumbent:
            continue
        row, quality = history.measured.get(arm.hash), history.quality(arm.strategy)
        if failed is not None:
            objections = [f"it ended with outcome {failed.outcome}: {failed.detail}"]
        elif standing is None or row is None:
            continue  # no race took place
        elif not standing.faster and proposal.fits:
            objections = ["no gain in step time is shown" if standing.low < 1 else "it is slower"]
        else:
            objections = _objections(row, history, proposal, agent)
        compared.append(
            Comparison(
                hash=arm.hash,
                label=arm.label,
                roles=arm.roles,
                outcome=failed.outcome if failed else "ok",
                step=standing and StepRatio(**standing.figures(), **_place(proposal)),
                predicted_ms=arm.prediction.step_ms,
                perplexity_ratio=quality.ratio if quality and quality.ratio < math.inf else None,
                objections=objections,
            )
        )
    return compared


def _objections(row: Measured, history: History, proposal: Proposal, agent: Agent) -> list[str]:
    """Return what speaks against holding an arm of a short enough step."""
    objections = []
    quality, tolerance = history.quality(row.strategy), agent.quality_tolerance
    failure, limit = row.failure(history.workload), proposal.memory_limit_bytes
    if failure is not None:
        objections.append(f"its trial ended with outcome {failure.outcome}: {failure.detail}")
    elif quality is None or not quality.sure:
        objections.append("its perplexity was not measured")
    elif not quality.ratio <= 1 + tolerance:
        trained = f" (seeds trained: {len(row.trained)})" if row.trained else ""
        objections.append(f"perplexity is above {1 + tolerance:.3f} times the start's{trained}")
    load, peaks = proposal.workload, [run.memory_peak_bytes for run in row.trained]
    if load.world_size == load.trained_on and max(peaks, default=0) > limit:
        objections.append(f"peak memory is above {limit / 1e6:.0f} MB")
    return objections


def _figures(best: Comparison) -> str:
    step = best.step
    assert step is not None, "it was compared"
    return (
        f"step {step.ratio:.3f} times the incumbent's (95 % of searches {step.low:.3f} to "
        f"{step.high:.3f}, {step.repetitions} repetitions), perplexity "
        f"{best.perplexity_ratio:.3f} times the start's"
    )
