"""Making the proposal of a round: evidence, candidates, verdict."""

from shardlab.agent.proposals.candidates import draft_candidates
from shardlab.agent.proposals.evidence import describe
from shardlab.agent.proposals.judge import Judge, Question
from shardlab.agent.proposals.validator import admit, memory_limit, reason_to_stop
from shardlab.agent.records.history import History
from shardlab.agent.records.proposal import Proposal
from shardlab.agent.records.rounds import Candidate, Refused, Verdict
from shardlab.experiment.schema import Agent
from shardlab.strategy.strategy import Strategy


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
