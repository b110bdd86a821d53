"""Limits of a trial: the repetitions of its race, and how long race and training may take."""

from collections.abc import Iterable
from itertools import chain
from statistics import fmean

from shardlab.choose.history import History
from shardlab.choose.records import Proposal
from shardlab.choose.settings import Agent
from shardlab.predict.announcement import race_budget_s
from shardlab.results.timing_result import BLOCK, TimingResult
from shardlab.strategy.sync import repetition_steps

_LEAST_REPETITIONS = 2 * BLOCK
"""Minimum of a race: after the first look an interval has one degree of freedom and shows nothing.
"""
_LEAST_S = 300.0
"""Limit of a trial of short steps, which spends most of its time on engines and traces."""


def with_limits(
    proposal: Proposal, agent: Agent, history: History, timed: Iterable[TimingResult]
) -> Proposal:
    """Return the proposal with the repetitions of its race and the maximum durations of its trial.

    Repetitions: as many as fit into `race_budget_s`, at least 20. Durations: the setting, or twice
    these repetitions for the race and four times the training of the start for training.

    Args:
        timed: all timings; measured steps on the link of the search replace predictions.
    """
    start_s = sum(run.steps * run.step_ms_mean for run in proposal.reference) / 1e3
    repetition_s = _repetition_s(proposal, chain(timed, *history.races.values()))
    repetitions = agent.repetitions
    if repetition_s:
        fitting = int(race_budget_s(agent.trial_timeout_s, start_s) / repetition_s / BLOCK) * BLOCK
        repetitions = min(repetitions, max(fitting, _LEAST_REPETITIONS))
    # twice, since a race does not look at its times in the second half of its limit
    limits = {"race_limit_s": 2 * repetitions * repetition_s, "training_limit_s": 4 * start_s}
    limits = {key: agent.trial_timeout_s or max(s, _LEAST_S) for key, s in limits.items()}
    return proposal.model_copy(update={**limits, "repetitions": repetitions})


def _repetition_s(proposal: Proposal, runs: Iterable[TimingResult]) -> float:
    """Return the seconds of a repetition of all arms, by measured steps or else by predictions."""
    load = proposal.workload
    setting = load.link, load.world_size, load.accumulation
    measured_ms = {
        run.strategy_hash: fmean(run.step_ms)
        for run in runs
        if (run.link, run.world_size, run.accumulation) == setting
    }
    steps_ms = [measured_ms.get(arm.hash, arm.prediction.step_ms) for arm in proposal.arms]
    longest = max((step for step in steps_ms if step is not None), default=0.0)
    *counts, silent = repetition_steps([*(arm.strategy.sync for arm in proposal.arms), None])
    arms_ms = [n * (longest if ms is None else ms) for ms, n in zip(steps_ms, counts, strict=True)]
    # a race also times steps without communication, which take no longer than the longest
    return (sum(arms_ms) + silent * longest) / 1e3
