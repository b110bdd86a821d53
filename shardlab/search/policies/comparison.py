"""Policies of the search, each replayed on the same tables."""

from collections.abc import Callable, Sequence

from shardlab.config.search import Policies
from shardlab.core.progress import track
from shardlab.search.judge import Judge, RuleJudge
from shardlab.search.policies.controls import (
    ConstantJudge,
    Patient,
    ShuffledEvidence,
    WithoutEvidence,
)
from shardlab.search.policies.documents import PolicyComparison
from shardlab.search.policies.judged import JudgedPolicy, Search, forecast_policy
from shardlab.search.policies.optuna_policy import SAMPLERS, OptunaPolicy
from shardlab.search.policies.policy import GreedyPolicy, ListPolicy, Policy, RandomPolicy
from shardlab.search.policies.replay import Table, replay
from shardlab.search.policies.summary import summarize

Make = Callable[[Table, int], Policy]
"""a policy for one table and seed"""
REFERENCE = "rules"


def compare(
    search: Search,
    tables: Sequence[Table],
    matrix: Sequence[str],
    plan: Policies,
    model: Judge | None = None,
) -> PolicyComparison:
    """Replay all policies on all tables, with as many seeds as the plan says.

    Args:
        matrix: hashes of the runs of the matrix, the shortest step first.
        model: language model that judges, without probes: they would hide what it chooses.
    """
    makes = all_policies(search, matrix, model)
    cases = [(name, table, n) for name in makes for table in tables for n in range(plan.seeds)]
    replays = [
        replay(makes[name](table, seed), table, seed, plan.budget)
        for name, table, seed in track(cases, "policies", unit="replay")
    ]
    return PolicyComparison(
        tables={table.name: len(table.runs) for table in tables},
        reference=REFERENCE,
        seeds=plan.seeds,
        summaries=summarize(replays, REFERENCE),
        replays=replays,
    )


def all_policies(search: Search, matrix: Sequence[str], model: Judge | None) -> dict[str, Make]:
    """Return every policy by name."""

    def judged(name: str, judge: Callable[[int], Judge]) -> Make:
        return lambda table, seed: JudgedPolicy(
            name, judge(seed), lambda known: search.proposer(table, known)
        )

    def controlled(name: str, judge: Judge) -> dict[str, Make]:
        return {
            name: judged(name, lambda seed: judge),
            f"{name}, shuffled": judged(
                f"{name}, shuffled", lambda seed: ShuffledEvidence(judge, seed)
            ),
        }

    def sampled(name: str) -> Make:
        return lambda table, seed: OptunaPolicy(name, table, seed)

    makes: dict[str, Make] = {
        **controlled(REFERENCE, RuleJudge()),
        "forecast": lambda table, seed: forecast_policy(search, table),
        "random": lambda table, seed: RandomPolicy(seed),
        "greedy": lambda table, seed: GreedyPolicy(seed),
        **{name: sampled(name) for name in SAMPLERS},
        "matrix": lambda table, seed: ListPolicy("matrix", matrix),
        "constant": lambda table, seed: ListPolicy("constant", table.strategies),
        "first listed": judged("first listed", lambda seed: ConstantJudge()),
    }
    if model is not None:
        patient = Patient(model)
        makes |= controlled("model", patient)
        blind = WithoutEvidence(patient)
        makes["model, no evidence"] = judged("model, no evidence", lambda seed: blind)
    return makes
