"""Searches made by hand; their figures come from tests/record_factory.py."""

import random
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from shardlab.choose.history import History, initial_history
from shardlab.choose.incumbent import with_best_incumbent
from shardlab.choose.judge import Question
from shardlab.choose.records import (
    Candidate,
    Proposal,
    Trial,
    Verdict,
)
from shardlab.choose.settings import Agent
from shardlab.results.files import AnyResult
from shardlab.results.result import Failure, FailureOutcome
from shardlab.results.timing_result import NO_COMMUNICATION, Race, TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import Strategy, parse_strategy
from shardlab.train.settings import Train
from tests.choose.machine import SETTINGS, raced
from tests.record_factory import (
    STRATEGIES,
    candidate_of,
    make_failure,
    make_records,
    trial_run,
)
from tests.timed_run_factory import make_timed

LIMIT = 4_000_000_000
AGENT = Agent(start="fsdp2", memory_limit_gb=LIMIT / 1e9)
DDP, DDP_INT8, FSDP2 = (parse_strategy(STRATEGIES[run]) for run in ("ddp", "ddp-int8", "fsdp2"))
KEPT = parse_strategy({"reshard_after_forward": False})
INT4_KEPT = parse_strategy({**STRATEGIES["fsdp2-int4"], "reshard_after_forward": False})


def begin(
    runs: list[str] | None = None, timed: Iterable[TimingResult] = (), agent: Agent = AGENT
) -> History:
    first = initial_history(make_records(runs, seeds=2), timed, agent, Train())
    return with_best_incumbent(first, agent.quality_tolerance, LIMIT, peaks_of_runs(first))


def peaks_of_runs(history: History) -> dict[str, int]:
    rows = history.measured.items()
    return {
        key: max(run.memory_peak_bytes for run in row.trained) for key, row in rows if row.trained
    }


def ask(*candidates: Candidate, incumbent_ms: float | None = 40.0) -> Question:
    return Question("Nothing is known.", incumbent_ms, [*candidates])


def proposal_of(history: History, *strategies: Strategy) -> Proposal:
    """Race of the incumbent, the start and these strategies."""
    arms: dict[str, Candidate] = {}
    for arm in (history.incumbent_results.strategy, history.start_results.strategy, *strategies):
        row = history.measured.get(arm.hash())
        fields = {"roles": ["judge"], "trained": bool(row and row.trained)}
        arms[arm.hash()] = candidate_of(arm).model_copy(update=fields)
    return Proposal(
        round=len(history.rounds) + 1,
        settings=SETTINGS,
        workload=history.workload,
        incumbent=history.incumbent,
        evidence="",
        memory_limit_bytes=LIMIT,
        space=None,
        candidates=[],
        verdict=Verdict(choice=None, reason="by test", judge="rules"),
        arms=[*arms.values()] if strategies else [],
        reference=[*history.start_results.trained],
        repetitions=120,
    )


def trial_of(
    proposal: Proposal,
    *trained: Sequence[AnyResult],
    losses: float = 7.6,
    **ratios: float | FailureOutcome,
) -> Trial:
    """Race in which an arm takes so many times the incumbent's step, or ends with that outcome.

    Args:
        losses: of the arms other than the incumbent, whose loss is 7.6.
        ratios: by hash, with `_` before it; 1 by default.
    """
    if not proposal.arms:
        return Trial(round=proposal.round)
    figures = {arm.hash: ratios.get(f"_{arm.hash}", 1.0) for arm in proposal.arms}
    lost = {key: outcome for key, outcome in figures.items() if outcome in get_args(FailureOutcome)}
    runs = [_raced(arm, figures[arm.hash]) for arm in proposal.arms if arm.hash not in lost]
    runs = [
        run.model_copy(update={"losses": [7.6 if run.run == proposal.incumbent else losses]})
        for run in runs
    ]
    # as in every race, beside the arms
    runs.append(make_timed(run=NO_COMMUNICATION, step_ms=[5.0] * 40))
    load = proposal.workload
    setting = {
        "kind": "race",
        "timing": f"round-{proposal.round}",
        "link": load.link,
        "world_size": load.world_size,
    }
    return Trial(
        round=proposal.round,
        race=Race(
            name=f"round-{proposal.round}",
            incumbent=proposal.incumbent,
            reason="every challenger is decided",
            seconds=9.5,
            runs=[run.model_copy(update=setting) for run in runs if proposal.incumbent not in lost],
            failures=[
                make_failure(arm.strategy, lost[arm.hash], **setting)
                for arm in proposal.arms
                if arm.hash in lost
            ],
        ),
        results=[
            result.model_copy(update={"timing": f"round-{proposal.round}"})
            for results in trained
            for result in results
        ],
        seconds=12.5,
    )


def trained(strategy: Strategy, quality: float = 1.0, **changes: Any) -> list[TrainResult]:
    """Training runs of a strategy with so many times the perplexity of fsdp2."""
    runs = [trial_run(strategy, seed, **changes) for seed in range(2)]
    return [run.model_copy(update={"val_ppl": quality * (run.val_ppl or 0.0)}) for run in runs]


def failed(
    strategy: Strategy, outcome: FailureOutcome, detail: str = "in training"
) -> list[Failure]:
    """A strategy whose training failed."""
    return [make_failure(strategy, outcome, detail)]


def _raced(arm: Candidate, ratio: float | FailureOutcome) -> TimingResult:
    assert isinstance(ratio, float)
    chance = random.Random(arm.hash)
    steps = [40 * ratio * (1 + 0.05 * chance.uniform(-1, 1)) for _ in range(40)]
    return raced(arm.hash, arm.strategy, steps)
