"""Proposal of a round: evidence, candidates, their validation, verdict."""

import json

from shardlab.agent.proposals.candidates import Draft, draft_candidates
from shardlab.agent.proposals.evidence import describe, estimate_peak, trials
from shardlab.agent.proposals.judge import Judge, Question
from shardlab.agent.records.history import History
from shardlab.agent.records.rounds import Candidate, Proposal, Refused, Verdict
from shardlab.core.errors import UserError
from shardlab.environment.host import memory_bytes
from shardlab.experiment.schema import Agent
from shardlab.strategy.strategy import Strategy, parse_strategy

_ID_DIGITS = 8
_SHOWN = 200


def memory_limit(agent: Agent, world_size: int) -> int:
    """Return the bytes that one rank may use: as given (1 GB = 10^9 B), or its part of the
    machine's."""
    if agent.memory_limit_gb is not None:
        return int(agent.memory_limit_gb * 1e9)
    return memory_bytes() // world_size


def reason_to_stop(history: History, agent: Agent) -> str | None:
    """Return why no more trials run, or None."""
    if trials(history) >= agent.budget:
        return f"the budget of {agent.budget} trials is spent"
    rejections = 0
    for each in reversed(history.rounds):
        if each.decision == "accept":
            break
        rejections += each.decision == "reject"
    if rejections >= agent.stop_loss:
        return f"stop-loss: the last {rejections} trials were rejected"
    return None


def admit(
    drafts: list[Draft], history: History, memory_limit_bytes: int, at_most: int
) -> tuple[list[Candidate], list[Refused]]:
    """Return the first `at_most` drafts that are valid, new and fit in memory, and the refused
    ones.

    Candidates come in the order of their ids, which says nothing about them.
    """
    admitted: dict[str, Candidate] = {}
    refused: list[Refused] = []
    for draft in drafts:
        if len(admitted) == at_most:
            break
        try:
            strategy = parse_strategy(draft.document)
        except UserError as error:
            refused.append(Refused(label=_shown(draft), reason=str(error)))
            continue
        key = strategy.hash()
        if key in admitted:
            continue  # two drafts of one meaning
        reason = _objection(strategy, history, memory_limit_bytes)
        if reason:
            refused.append(Refused(label=strategy.label(), reason=reason))
        else:
            admitted[key] = _candidate(strategy, draft.why)
    return sorted(admitted.values(), key=lambda candidate: candidate.id), _once(refused)


def _objection(strategy: Strategy, history: History, memory_limit_bytes: int) -> str | None:
    known = history.measured.get(strategy.hash())
    if known is not None:
        result = "measured" if known.outcome == "ok" else f"tried, outcome {known.outcome}"
        return f"already {result}: {known.source}"
    peak = estimate_peak(strategy, history.incumbent, history.workload)
    if peak > memory_limit_bytes:
        return (
            f"needs about {peak / 1e6:.0f} MB per rank, the limit is "
            f"{memory_limit_bytes / 1e6:.0f} MB"
        )
    return None


def _candidate(strategy: Strategy, why: str) -> Candidate:
    return Candidate(
        id=strategy.hash()[:_ID_DIGITS],
        strategy=strategy.canonical(),
        label=strategy.label(),
        why=why,
    )


def _shown(draft: Draft) -> str:
    return json.dumps(draft.document, sort_keys=True)[:_SHOWN]


def _once(refused: list[Refused]) -> list[Refused]:
    """Remove duplicates that several sources of drafts bring."""
    return list({(each.label, each.reason): each for each in refused}.values())


def propose(
    number: int, history: History, agent: Agent, named: dict[str, Strategy], judge: Judge
) -> Proposal:
    """Make the proposal of round `number`.

    Nothing is chosen when the search has to stop, when no candidate is left or when the judge
    abstains; the verdict's reason says which.

    Args:
        named: strategies of the user that are not in the matrix.

    Raises:
        UserError: the judge cannot be asked.
    """
    limit = memory_limit(agent, history.workload.world_size)
    evidence = describe(history, agent, limit)
    candidates: list[Candidate] = []
    refused: list[Refused] = []
    stop = reason_to_stop(history, agent)
    if stop is None:
        drafts = draft_candidates(agent.candidates, history, named, limit)
        candidates, refused = admit(drafts, history, limit, agent.max_candidates)
        stop = None if candidates else "no candidate is valid, new and within the memory limit"
    if stop is None:
        verdict = judge.choose(Question(evidence, history, candidates, agent.quality_tolerance))
    else:
        verdict = Verdict(choice=None, reason=stop, judge=judge.name)
    chosen = next((each.strategy for each in candidates if each.id == verdict.choice), None)
    assert (chosen is None) == (verdict.choice is None), "a judge only chooses what is offered"
    return Proposal(
        round=number,
        incumbent_hash=history.incumbent.hash,
        evidence=evidence,
        memory_limit_bytes=limit,
        candidates=candidates,
        refused=refused,
        verdict=verdict,
        chosen=chosen,
        chosen_hash=chosen.hash() if chosen else None,
    )
