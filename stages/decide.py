"""Accept the strategy of a trial or roll back, and add the round to the history."""

from shardlab.agent.decisions.decision import conclude
from shardlab.agent.records.history import known_before
from shardlab.agent.records.rounds import Proposal, Trial
from shardlab.core.progress import say
from shardlab.experiment.parameters import Parameters
from shardlab.records.run import read_records
from stages.common import run

RESULTS = "results/results.jsonl"


def main(params: Parameters, number: str) -> None:
    """Write history.json of the round: all that the next round needs."""
    plan, agent = params(f"rounds.{number}", "agent")
    folder = f"results/rounds/{number}"
    before = known_before(plan.after, RESULTS, read_records(RESULTS), agent.start)
    proposal = Proposal.from_file(f"{folder}/proposal.json")
    trial = Trial.from_file(f"{folder}/trial.json")
    history = conclude(before, proposal, trial, agent.quality_tolerance)
    history.to_file(f"{folder}/history.json")
    say(f"round {number}: {history.rounds[-1].decision}: {history.rounds[-1].reason}")


if __name__ == "__main__":
    run(main)
