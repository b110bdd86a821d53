"""Propose the strategy that a round of the search tries."""

from pathlib import Path

from shardlab.agent.proposals.endpoint import Endpoint
from shardlab.agent.proposals.http_judge import HttpJudge
from shardlab.agent.proposals.judge import Judge, RuleJudge
from shardlab.agent.proposals.proposal import propose
from shardlab.agent.records.history import known_before
from shardlab.core.progress import say
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Agent
from shardlab.records.run import read_records
from stages.common import integer, run

RESULTS = "results/results.jsonl"
ANSWERS = Path("results/judge")


def main(params: Parameters, number: str) -> None:
    """Write proposal.json of the round; a language model's answers are kept next to the rounds."""
    plan, agent = params(f"rounds.{number}", "agent")
    strategies, runs = params("strategies", "runs")
    history = known_before(plan.after, RESULTS, read_records(RESULTS), agent.start)
    unmeasured = {name: each for name, each in strategies.items() if name not in runs}
    proposal = propose(integer("round", number), history, agent, unmeasured, judge_of(agent))
    proposal.to_file(f"results/rounds/{number}/proposal.json")
    chosen = proposal.chosen.label() if proposal.chosen else "nothing"
    say(f"round {number}: {chosen} ({proposal.verdict.judge}: {proposal.verdict.reason})")


def judge_of(agent: Agent) -> Judge:
    """Return the judge that the parameters name."""
    if agent.judge == "rules":
        return RuleJudge()
    assert agent.endpoint and agent.model, "the parameters demand both with judge: http"
    return HttpJudge(Endpoint.from_environment(agent.endpoint, agent.model), ANSWERS)


if __name__ == "__main__":
    run(main)
