"""Regret of policies by budget, with paired bootstrap intervals, and what else their replays show.

Workloads are drawn with replacement, and seeds in each of them: the same draws for all policies, so
that their differences are paired (Efron and Tibshirani 1993, chapter 8).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardlab.core.interval import CONFIDENCE
from shardlab.search.policies.documents import NEAR, Interval, Replay, Summary

Array = NDArray[np.float64]


def summarize(replays: Sequence[Replay], reference: str, draws: int = 2000) -> list[Summary]:
    """Return a summary of each policy.

    Args:
        replays: every policy on every workload with every seed, with one budget.
        reference: policy that the others are compared with.
    """
    names = list(dict.fromkeys(each.policy for each in replays))
    workloads = list(dict.fromkeys(each.workload for each in replays))
    seeds = sorted({each.seed for each in replays})
    known = {(each.policy, each.workload, each.seed): each for each in replays}
    regrets = {
        name: np.array([[known[name, load, seed].regret for seed in seeds] for load in workloads])
        for name in names
    }
    chance = np.random.default_rng(0)
    loads = chance.integers(len(workloads), size=(draws, len(workloads), 1))
    drawn = chance.integers(len(seeds), size=(draws, len(workloads), len(seeds)))

    def intervals(values: Array) -> list[Interval]:
        """Return one for each budget, of values [workloads, seeds, budgets]."""
        means = values[loads, drawn].mean(axis=(1, 2))
        low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
        columns = values.mean(axis=(0, 1)).tolist(), low.tolist(), high.tolist()
        return [Interval(mean=m, low=a, high=b) for m, a, b in zip(*columns, strict=True)]

    found = []
    for name in names:
        last = regrets[name][:, :, -1]
        own, values = [each for each in replays if each.policy == name], regrets[name]
        found.append(
            Summary(
                policy=name,
                regret=intervals(values),
                ahead=intervals(values - regrets[reference]),
                by_workload=dict(zip(workloads, last.mean(axis=1).tolist(), strict=True)),
                near=float((last <= NEAR).mean()),
                first=_mean([each.first for each in own]),
                first_near=float((values[:, :, 1] <= NEAR).mean()),
                measured=_mean([len(each.picks) for each in own]),
                abstained=_mean([each.abstained for each in own]),
                infeasible=_mean([each.infeasible for each in own]),
                flips=_mean([each.flips for each in own]),
            )
        )
    return found


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
