"""Replay policies of the search on timings of many strategies: how near the best each comes."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.search.conversation import Conversation
from shardlab.search.policies.documents import PolicyComparison
from stages import plans
from stages.common import run
from stages.plans import Values

_FOLDER = Path("results/policies")
_CONVERSATION = _FOLDER / "conversation.json"


def main(params: Parameters) -> None:
    """Write policies.json and conversation.json in results/policies."""
    plan = plans.policies(params)
    found = PolicyComparison()
    if plan["policies"].timings:
        found = _replayed(plan)
    else:
        Conversation(judge="rules").to_file(_CONVERSATION)
    found.to_file(_FOLDER / "policies.json")
    say(f"policies: {len(found.replays)} replays on {len(found.tables)} timings")


def _replayed(plan: Values) -> PolicyComparison:
    # imported here: most experiments replay no policy, and these take seconds
    from shardlab.forecast.bounds import step_s
    from shardlab.forecast.check import fitted_runs

    from shardlab.config.calibration_record import Calibration
    from shardlab.config.run_record import read_records
    from shardlab.config.strategy import CanonicalStrategy
    from shardlab.config.timing_record import NO_COMMUNICATION, TimedRun, read_all
    from shardlab.models.unit_shapes import ModelShapes
    from shardlab.search.beginning import initial_history
    from shardlab.search.judge import RuleJudge
    from shardlab.search.judges import model_of
    from shardlab.search.policies.comparison import compare
    from shardlab.search.policies.judged import Search
    from shardlab.search.policies.replay import Table

    policies, agent, train = plan["policies"], plan["agent"], plan["train"]
    timed = read_all(Path("results/timings"), plan["timings"])
    history = initial_history(read_records("results/results.jsonl"), [], agent, train)
    shapes = ModelShapes.of(plan["model"], train, Path("data/tokens"), on_gpu=False)
    calibration = Calibration.from_file(
        "results/calibration.json", "run python -m stages.calibrate"
    )
    # not even the bounds of timings that are replayed
    unseen = [run for run in timed if run.timing not in policies.timings]
    search = Search(history, agent, shapes, calibration, fitted_runs(unseen, plan["forecast"]))

    def admissible(strategy: CanonicalStrategy) -> bool:
        quality = history.quality(strategy)
        return quality is not None and quality.ratio <= 1 + agent.quality_tolerance

    def runs_of(name: str) -> list[TimedRun]:
        return [each for each in timed if each.timing == name]

    tables = [Table.of(runs_of(name), history.start, admissible) for name in policies.timings]
    matrix = [each for each in runs_of(plan["comparison"]) if each.run != NO_COMMUNICATION]
    hashes = [each.strategy_hash for each in sorted(matrix, key=step_s) if each.strategy_hash]
    try:
        model = model_of(agent)
    except UserError as error:
        say(f"policies: without {agent.judge}: {error}")
        model = None
    try:
        return compare(search, tables, hashes, policies, model)
    finally:  # what a model has answered is dear
        (model or RuleJudge()).conversation().to_file(_CONVERSATION)


if __name__ == "__main__":
    run(main)
