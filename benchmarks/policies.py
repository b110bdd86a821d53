"""Regret of policies of the search by budget, on the tables of `params/search.yaml`.

    python -m benchmarks.policies [POLICY...] [--seeds N] [--endpoint URL --model NAME]

reads the timings of all strategies, the calibration and the records of the matrix. Every policy
measures the start, then up to `--budget` strategies. Strategies whose perplexity is not tolerated
are none of the table. With an endpoint a language model chooses as well: as in a search, with
shuffled evidence and without any. `shardlab/agent/policies/replay.py` defines regret.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import (
    DATA,
    RIVAL_PACKAGES,
    WORK,
    arguments,
    choose,
    print_table,
    write_results,
)
from benchmarks.optuna_policies import SAMPLERS, OptunaPolicy
from shardlab.agent.policies.controls import ConstantJudge, ShuffledEvidence, WithoutEvidence
from shardlab.agent.policies.judged import JudgedPolicy, Search, forecast_policy
from shardlab.agent.policies.policy import GreedyPolicy, ListPolicy, Policy, RandomPolicy
from shardlab.agent.policies.replay import Replay, Table, replay
from shardlab.agent.policies.summary import Interval, Summary, summarize
from shardlab.agent.proposals.chat_judge import ChatJudge
from shardlab.agent.proposals.endpoint import Endpoint
from shardlab.agent.proposals.judge import Judge, RuleJudge
from shardlab.agent.records.beginning import initial_history
from shardlab.core.checksums import read_checked
from shardlab.core.errors import UserError
from shardlab.core.progress import track
from shardlab.experiment.parameters import Parameters
from shardlab.forecast.check import fitted_runs
from shardlab.forecast.model import step_s
from shardlab.measurements.calibration import Calibration
from shardlab.models.build import build_model
from shardlab.records.run import read_records
from shardlab.records.timing import NO_COMMUNICATION, TimedRun, read_timing
from shardlab.strategy.strategy import CanonicalStrategy
from shardlab.units.shapes import ModelShapes

Make = Callable[[Table, int], Policy]
"""a policy for one table and seed"""
REFERENCE = "rules"


class Measured(NamedTuple):
    """Everything that was measured."""

    tables: list[Table]
    search: Search
    matrix: list[str]
    """hashes of the runs of the comparison, the shortest step first"""


def read(params: Path, results: Path, data: Path) -> Measured:
    """Read the tables: the timings of all strategies.

    Raises:
        UserError: a file is missing, or no timing is of all strategies.
    """
    values = Parameters(params)
    strategies, timings, comparison = values("strategies", "timings", "comparison")
    agent, train, model, forecast = values("agent", "train", "model", "forecast")
    given = {
        name: read_timing(results / "timings", name, timing) for name, timing in timings.items()
    }
    names = [name for name, timing in timings.items() if {*timing.runs} == {*strategies}]
    if not names:
        raise UserError(f"{params}: timings: none is of all strategies: add one")
    timed = [run for runs in given.values() for run in runs]
    history = initial_history(read_records(results / "results.jsonl"), [], agent, train)

    def admissible(strategy: CanonicalStrategy) -> bool:
        quality = history.quality(strategy)
        return quality is not None and quality.ratio <= 1 + agent.quality_tolerance

    tokens = read_checked(data / "tokens/manifest.json", "run python -m stages.tokenize")
    sizes = tokens["vocabulary"], train.sequence_length, tokens["end_of_text"]
    shapes = ModelShapes(build_model(model, *sizes, seed=0).module, train)
    calibration = Calibration.from_file(
        results / "calibration.json", "run python -m stages.calibrate"
    )
    search = Search(history, agent, shapes, calibration, fitted_runs(timed, forecast))
    tables = [Table.of(given[name], history.start, admissible) for name in names]
    return Measured(tables, search, _fastest(given[comparison]))


def _fastest(timed: list[TimedRun]) -> list[str]:
    runs = [run for run in timed if run.run != NO_COMMUNICATION]
    return [run.strategy_hash for run in sorted(runs, key=step_s) if run.strategy_hash]


def policies(search: Search, matrix: list[str], packages: Path) -> dict[str, Make]:
    """Return all policies that need no server, by name."""

    def judged(name: str, judge: Callable[[int], Judge]) -> Make:
        return lambda table, seed: JudgedPolicy(
            name, judge(seed), lambda known: search.proposer(table, known)
        )

    def sampled(name: str) -> Make:
        return lambda table, seed: OptunaPolicy(name, table, seed, packages)

    return {
        "rules": judged("rules", lambda seed: RuleJudge()),
        "forecast": lambda table, seed: forecast_policy(search, table),
        "random": lambda table, seed: RandomPolicy(seed),
        "greedy": lambda table, seed: GreedyPolicy(seed),
        **{name: sampled(name) for name in SAMPLERS},
        "matrix": lambda table, seed: ListPolicy("matrix", matrix),
        "constant": lambda table, seed: ListPolicy("constant", table.strategies),
        "first listed": judged("first listed", lambda seed: ConstantJudge()),
        "rules, shuffled": judged(
            "rules, shuffled", lambda seed: ShuffledEvidence(RuleJudge(), seed)
        ),
    }


def served(search: Search, endpoint: str, model: str) -> dict[str, Make]:
    """Return the policies in which a language model chooses."""
    judge = ChatJudge(Endpoint.from_environment(endpoint, model))
    judges: dict[str, Callable[[int], Judge]] = {
        "http": lambda seed: judge,
        "http, shuffled": lambda seed: ShuffledEvidence(judge, seed),
        "http, no evidence": lambda seed: WithoutEvidence(judge),
    }

    def made(name: str) -> Make:
        return lambda table, seed: JudgedPolicy(
            name, judges[name](seed), lambda known: search.proposer(table, known)
        )

    return {name: made(name) for name in judges}


def main() -> None:
    args = arguments(
        __doc__,
        ("policies", "default: all"),
        params=Path("params/search.yaml"),
        results=(Path("results"), "folder of the pipeline"),
        data=DATA,
        work=WORK,
        rivals=RIVAL_PACKAGES,
        seeds=5,
        budget=8,
        endpoint=("", "base URL of a language model, ending in /v1"),
        model="",
    )
    found = read(args.params, args.results, args.data)
    makes = policies(found.search, found.matrix, args.rivals)
    if args.endpoint:
        makes |= served(found.search, args.endpoint, args.model)
    names = choose(args.policies, makes, makes)
    cases = [
        (n, table, seed) for n in names for table in found.tables for seed in range(args.seeds)
    ]
    replays = [
        replay(makes[name](table, seed), table, seed, args.budget)
        for name, table, seed in track(cases, "replay", unit="replay")
    ]
    reference = REFERENCE if REFERENCE in names else names[0]
    report(summarize(replays, reference), replays, found.tables, args.work)


def report(
    summaries: list[Summary], replays: list[Replay], tables: list[Table], folder: Path
) -> None:
    """Write the figures as JSON and print them as tables."""
    write_results(
        folder / "policies.json",
        tables={table.name: len(table.runs) for table in tables},
        summaries=[each.model_dump(mode="json") for each in summaries],
        replays=[each.model_dump(mode="json") for each in replays],
    )
    budgets = [*map(str, range(len(replays[0].regret)))]
    rows = [[each.policy, *map(_interval, each.regret)] for each in summaries]
    print_table("Mean regret by number of measurements, %", ["policy", *budgets], rows)
    rows = [[each.policy, *map(_interval, each.ahead)] for each in summaries]
    print_table("Regret beyond the reference's, %", ["policy", *budgets], rows)
    loads = list(summaries[0].by_workload)
    rows = [[e.policy, *(_percent(e.by_workload[load]) for load in loads)] for e in summaries]
    print_table("Mean regret after all measurements, %", ["policy", *loads], rows)
    shares = ("near", "first", "first_near", "abstained")
    counts = ("measured", "infeasible", "flips")
    rows = [
        [
            e.policy,
            *(_percent(getattr(e, n)) for n in shares),
            *(f"{getattr(e, n):.1f}" for n in counts),
        ]
        for e in summaries
    ]
    headings = [
        *("policy", "within 5 %, %", "first pick best, %", "first within 5 %, %", "abstained, %"),
        *("measured", "infeasible", "order flips"),
    ]
    print_table("Replays", headings, rows)


def _interval(each: Interval) -> str:
    return f"{_percent(each.mean)} ({_percent(each.low)} to {_percent(each.high)})"


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


if __name__ == "__main__":
    main()
