"""Accept or roll back: a trial replaces the incumbent only on evidence.

Runs with the same seed start from the same weights and see the same data, so steps are compared
seed by seed: the logarithm of trial over incumbent of `step_ms_p50`, its mean over the seeds and
Student's 95 % interval with n - 1 degrees of freedom. The whole interval has to lie below 1.
One seed has no interval, so it cannot show a gain: the trial is rejected and the reason says so.
"""

import math

from shardlab.agent.records.history import History, Measured
from shardlab.agent.records.rounds import (
    Comparison,
    Decision,
    Measurement,
    Proposal,
    Round,
    Trial,
    TrialSummary,
)
from shardlab.core.errors import UserError
from shardlab.core.interval import interval_factor


def decide(
    history: History,
    measurements: list[Measurement],
    quality_tolerance: float,
    memory_limit_bytes: int,
) -> Decision:
    """Decide on a trial that succeeded.

    Accepted only when the upper end of the interval of the step ratio is below 1, the mean
    perplexity is at most `1 + quality_tolerance` times that of the strategy that the search
    started from, and no seed's peak memory is above the limit.
    """
    comparison = compare(history, measurements)
    if comparison is None:
        return Decision(
            decision="reject", reason="no seed was measured with both the trial and the incumbent"
        )
    objections = _objections(comparison, quality_tolerance, memory_limit_bytes)
    why = "; ".join(objections) or "shorter steps"
    return Decision(
        decision="reject" if objections else "accept",
        reason=f"{why}. {_figures(comparison)}",
        comparison=comparison,
    )


def compare(history: History, measurements: list[Measurement]) -> Comparison | None:
    """Compare a trial with the incumbent seed by seed; None when they have no seed in common."""
    incumbent = {each.seed: each.step_ms_p50 for each in history.incumbent.measurements}
    logs = [
        math.log(each.step_ms_p50 / incumbent[each.seed])
        for each in measurements
        if each.seed in incumbent
    ]
    if not logs:
        return None
    mean = sum(logs) / len(logs)
    start = history.measured[history.start]
    quality = sum(each.val_ppl for each in measurements) / len(measurements)
    return Comparison(
        seeds=len(logs),
        step_ratio=math.exp(mean),
        interval=_interval(logs, mean),
        perplexity_ratio=quality / start.mean("val_ppl"),
        memory_peak_bytes=max(each.memory_peak_bytes for each in measurements),
    )


def conclude(
    history: History, proposal: Proposal, trial: Trial, quality_tolerance: float
) -> History:
    """Return the history after a round: the strategy as measured, and as incumbent if accepted.

    Raises:
        UserError: the trial is not of the strategy that was proposed.
    """
    if trial.hash != proposal.chosen_hash:
        raise UserError(
            f"round {proposal.round}: the trial is of {trial.hash}, the proposal of "
            f"{proposal.chosen_hash}: run the trial again"
        )
    measurements = [Measurement.of(record) for record in trial.records]
    decision = _decision(history, proposal, trial, measurements, quality_tolerance)
    entry = _measured(proposal, trial, measurements)
    return history.model_copy(
        update={
            "incumbent": entry if entry and decision.decision == "accept" else history.incumbent,
            "measured": {**history.measured, **({entry.hash: entry} if entry else {})},
            "rounds": [*history.rounds, _round(proposal, trial, measurements, decision)],
        }
    )


def _decision(
    history: History,
    proposal: Proposal,
    trial: Trial,
    measurements: list[Measurement],
    quality_tolerance: float,
) -> Decision:
    if trial.outcome == "none":
        return Decision(decision="none", reason=f"nothing was tried: {proposal.verdict.reason}")
    if trial.outcome != "ok":
        return Decision(decision="reject", reason=f"the trial ended with outcome {trial.outcome}")
    return decide(history, measurements, quality_tolerance, proposal.memory_limit_bytes)


def _measured(proposal: Proposal, trial: Trial, measurements: list[Measurement]) -> Measured | None:
    if proposal.chosen is None or proposal.chosen_hash is None:
        return None
    return Measured(
        strategy=proposal.chosen.canonical(),
        hash=proposal.chosen_hash,
        source=f"round {proposal.round}",
        outcome=trial.outcome,
        detail=trial.detail,
        measurements=measurements,
    )


def _round(
    proposal: Proposal, trial: Trial, measurements: list[Measurement], decision: Decision
) -> Round:
    return Round(
        round=proposal.round,
        verdict=proposal.verdict,
        candidates=proposal.candidates,
        refused=proposal.refused,
        trial=TrialSummary(
            outcome=trial.outcome,
            detail=trial.detail,
            hash=proposal.chosen_hash,
            label=proposal.chosen.label() if proposal.chosen else None,
            measurements=measurements,
        ),
        **dict(decision),
    )


def _interval(logs: list[float], mean: float) -> list[float] | None:
    """Return the low and the high end of the ratio's 95 % interval."""
    count = len(logs)
    if count < 2:
        return None
    deviation = math.sqrt(sum((each - mean) ** 2 for each in logs) / (count - 1))
    half = interval_factor(count) * deviation
    return [math.exp(mean - half), math.exp(mean + half)]


def _objections(
    comparison: Comparison, quality_tolerance: float, memory_limit_bytes: int
) -> list[str]:
    """Return every reason against acceptance; the comparisons are written so that NaN counts."""
    found = []
    if comparison.interval is None:
        found.append("one seed gives no interval: add seeds")
    elif not comparison.interval[1] < 1:
        found.append("no gain in step time is shown: the interval reaches 1")
    if not comparison.perplexity_ratio <= 1 + quality_tolerance:
        found.append(f"perplexity is above {1 + quality_tolerance:.3f} times the start's")
    if comparison.memory_peak_bytes > memory_limit_bytes:
        found.append(f"peak memory is above {memory_limit_bytes / 1e6:.0f} MB")
    return found


def _figures(comparison: Comparison) -> str:
    ends = comparison.interval
    interval = f", 95 % interval {ends[0]:.3f} to {ends[1]:.3f}" if ends else ""
    plural = "s" if comparison.seeds != 1 else ""
    return (
        f"Step time {comparison.step_ratio:.3f} times the incumbent's "
        f"({comparison.seeds} seed{plural}{interval}); "
        f"perplexity {comparison.perplexity_ratio:.3f} times the start's; "
        f"peak memory {comparison.memory_peak_bytes / 1e6:.0f} MB"
    )
