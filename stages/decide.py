"""Accept the strategy of a trial or roll back, and add the round to the history."""

from shardlab.agent.decisions.decision import conclude
from shardlab.agent.records.history import known_before
from shardlab.agent.records.rounds import read_proposal, read_trial
from shardlab.core.files import write_json
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
    proposal = read_proposal(f"{folder}/proposal.json")
    trial = read_trial(f"{folder}/trial.json")
    history = conclude(before, proposal, trial, agent.quality_tolerance)
    write_json(f"{folder}/history.json", history.model_dump(mode="json"))
    say(f"round {number}: {history.rounds[-1].decision}: {history.rounds[-1].reason}")


if __name__ == "__main__":
    run(main)
