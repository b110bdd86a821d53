"""Replay of a policy on a table: a workload on which all strategies were timed, interleaved.

A random half of the repetitions is what a policy measures, and chooses by; the other half says what
its choice is worth. So the noise of a measurement is no regret, and no luck.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardlab.config.strategy import CanonicalStrategy, parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun
from shardlab.core.errors import UserError
from shardlab.search.policies.documents import Replay
from shardlab.search.policies.policy import Known, Policy


class Table(NamedTuple):
    """A workload on which every strategy was timed."""

    name: str
    start: str
    """hash of the strategy that every policy measures first"""
    strategies: Mapping[str, CanonicalStrategy]
    """by hash"""
    runs: Mapping[str, TimedRun]
    """by hash"""
    alone: TimedRun
    """steps without communication"""

    @classmethod
    def of(
        cls,
        timed: Sequence[TimedRun],
        start: str,
        admissible: Callable[[CanonicalStrategy], bool],
    ) -> "Table":
        """Return the table of one timing.

        Args:
            timed: its runs, steps without communication included.
            admissible: whether a strategy may be chosen; the start may.

        Raises:
            UserError: too few repetitions, or the start was not timed.
        """
        name = timed[0].timing
        strategies, runs = {}, {}
        for run in timed:
            if run.run == NO_COMMUNICATION:
                continue
            strategy = parse_strategy(run.strategy, f"strategy of {run.run}").canonical()
            key = strategy.hash()
            if key == start or admissible(strategy):
                strategies[key], runs[key] = strategy, run
        if start not in runs:
            raise UserError(f"timings.{name}: lacks the strategy of agent.start: add it to runs")
        if len(timed[0].step_ms) < 4:
            raise UserError(f"timings.{name}: repetitions: at least 4 are needed for two halves")
        (alone,) = (run for run in timed if run.run == NO_COMMUNICATION)
        return cls(name, start, strategies, runs, alone)

    def halves(self, seed: int) -> tuple[list[int], list[int]]:
        """Return two halves of the repetitions, drawn at random."""
        count = len(self.alone.step_ms)
        drawn = np.random.default_rng(seed).permutation(count).tolist()
        return sorted(drawn[: count // 2]), sorted(drawn[count // 2 :])

    def known(self, picks: Sequence[str], half: Sequence[int], logs: Mapping[str, float]) -> Known:
        """Return what a policy sees that has measured some strategies, the start first."""

        def steps(run: TimedRun) -> list[float]:
            return [run.step_ms[n] for n in half]

        return Known(
            self.strategies,
            {key: steps(self.runs[key]) for key in picks},
            steps(self.alone),
            {key: math.exp(logs[key] - logs[self.start]) for key in picks},
        )

    def logs(self, half: Sequence[int]) -> dict[str, float]:
        """Return the median log step of each strategy in some repetitions.

        The median of all strategies in a repetition is subtracted, which the drift of the machine
        is part of.
        """
        steps = np.log([[run.step_ms[n] for n in half] for run in self.runs.values()])
        own: NDArray[np.float64] = np.median(steps - np.median(steps, axis=0), axis=1)
        return dict(zip(self.runs, own.tolist(), strict=True))


def replay(policy: Policy, table: Table, seed: int, budget: int) -> Replay:
    """Let a policy measure up to `budget` strategies besides the start."""
    measured, held_out = table.halves(seed)
    seen, worth = table.logs(measured), table.logs(held_out)
    oracle = min(seen, key=seen.__getitem__)
    picks = [table.start]
    infeasible = flips = 0
    abstained = False
    for _ in range(min(budget, len(table.runs) - 1)):
        choice = policy.choose(table.known(picks, measured, seen))
        infeasible, flips = infeasible + choice.infeasible, flips + choice.flips
        if choice.strategy is None:
            abstained = True
            break
        assert choice.strategy not in picks, f"{policy.name} chose a strategy twice"
        picks.append(choice.strategy)
    held = [min(picks[: n + 1], key=seen.__getitem__) for n in range(len(picks))]
    held += [held[-1]] * (budget + 1 - len(held))
    return Replay(
        policy=policy.name,
        workload=table.name,
        seed=seed,
        picks=picks[1:],
        regret=[math.expm1(worth[key] - worth[oracle]) for key in held],
        first=picks[1:2] == [oracle],
        abstained=abstained,
        infeasible=infeasible,
        flips=flips,
    )
