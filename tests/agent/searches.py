"""Searches made for tests; their figures come from tests/record_factory.py."""

from typing import Any

from shardlab.agent.proposals.evidence import describe
from shardlab.agent.proposals.judge import Judge, Question, RuleJudge
from shardlab.agent.proposals.proposal import propose
from shardlab.agent.records.history import History, initial_history
from shardlab.agent.records.rounds import (
    Candidate,
    Decision,
    Proposal,
    Round,
    Trial,
    TrialSummary,
    Verdict,
)
from shardlab.experiment.schema import Agent
from shardlab.records.run import Record
from shardlab.strategy.strategy import Strategy, parse_strategy
from tests.record_factory import make_record, make_records

LIMIT = 4_000_000_000
AGENT = Agent(start="fsdp2", memory_limit_gb=LIMIT / 1e9)


def begin(runs: list[str] | None = None, start: str = "fsdp2", seeds: int = 3) -> History:
    return initial_history(make_records(runs, seeds), start)


def records_of(strategy: Strategy, seeds: int = 3, **changes: Any) -> list[Record]:
    """Records as a trial of `strategy` would leave them, with the figures of run fsdp2."""
    normal = strategy.canonical()
    return [
        make_record(
            "fsdp2",
            seed,
            **{
                "strategy": normal.model_dump(mode="json"),
                "strategy_hash": strategy.hash(),
                **changes,
            },
        )
        for seed in range(seeds)
    ]


def trial_of(strategy: Strategy, **changes: Any) -> Trial:
    return Trial(
        outcome="ok",
        strategy=strategy.canonical(),
        hash=strategy.hash(),
        key="0" * 64,
        limit_s=300.0,
        records=records_of(strategy, **changes),
    )


def proposal_of(history: History, judge: Judge | None = None, agent: Agent = AGENT) -> Proposal:
    return propose(len(history.rounds) + 1, history, agent, {}, judge or RuleJudge())


def candidate(**document: Any) -> Candidate:
    strategy = parse_strategy(document)
    return Candidate(
        id=strategy.hash()[:8], strategy=strategy.canonical(), label=strategy.label(), why="by test"
    )


def ask(history: History, *candidates: Candidate) -> Question:
    return Question(describe(history, AGENT, LIMIT), history, list(candidates), 0.03)


def past_round(number: int, decision: str, outcome: str = "ok") -> Round:
    """A round of which only the decision matters."""
    made = Decision.model_validate({"decision": decision, "reason": "by test"})
    return Round(
        round=number,
        verdict=Verdict(choice=None, reason="by test", judge="rules"),
        candidates=[],
        refused=[],
        trial=TrialSummary.model_validate(
            {"outcome": outcome, "detail": "", "hash": None, "label": None, "measurements": []}
        ),
        **made.model_dump(),
    )
