"""What every codec costs in perplexity: the runs of params/codecs.yaml at several world sizes.

    python -m benchmarks.convergence [RUN ...] [--world-size W ...] [--params FILE]
                                     [--data FOLDER] [--work FOLDER]

The same runs and records as the pipeline's train, profile and validate stages, all forked from this
process, which imports torch once. A step takes the same samples at every world size: the batch of a
rank is made smaller as the ranks become more. Perplexities are compared seed by seed with the
baseline's, as in the report. Records are kept in the work folder, one file per world size; of a
clean revision they are not measured again.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from shardlab.core.errors import UserError
from shardlab.core.progress import say, stopwatch
from shardlab.environment.host import git_revision
from shardlab.experiment.parameters import Parameters
from shardlab.experiment.schema import Train
from shardlab.launch import RunFailed
from shardlab.loop.plan import RunPlan
from shardlab.records.run import Record, read_records, write_records
from shardlab.report.aggregate import comparison, select
from shardlab.report.columns import PPL, PPL_CHANGE
from shardlab.report.numbers import ABSENT, figure, optional
from shardlab.report.tables import text_table
from shardlab.train.measure import measure

GOAL_RATIO, GOAL_CHANGE = 4.0, 0.01
"""fewer gradient bytes, at no more than this share of perplexity"""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default: all of the file")
    parser.add_argument("--world-size", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--params", type=Path, default=Path("params/codecs.yaml"))
    parser.add_argument("--data", type=Path, default=Path("data"), help="the pipeline's folder")
    parser.add_argument("--work", type=Path, default=Path(".work/benchmarks"), help="for results")
    args = parser.parse_args()
    params = Parameters(args.params)
    runs, seeds, baseline = params("runs", "seeds", "baseline")
    unknown = set(args.runs) - set(runs)
    if unknown:
        raise UserError(f"{', '.join(sorted(unknown))}: not in the runs of {args.params}")
    chosen = [run for run in runs if not args.runs or run in {baseline, *args.runs}]
    failed = False
    for world_size in args.world_size:
        plans = [
            _plan(params, run, seed, world_size, args.data) for run in chosen for seed in seeds
        ]
        path = args.work / f"convergence-{world_size}.jsonl"
        records, failures = _measured(plans, path)
        finished = [run for run in chosen if run not in failures]
        if baseline in finished:
            print(_table(select(records, finished, seeds), finished, baseline, world_size))
        for run, reason in failures.items():
            failed = True
            print(f"W={world_size}: {run} failed: {reason}\n")
    sys.exit(failed)


def _plan(params: Parameters, run: str, seed: int, world_size: int, data: Path) -> RunPlan:
    strategy, train, model = params(f"strategies.{run}", "train", "model")
    return RunPlan(run, seed, strategy, _spread(train, world_size), model, data)


def _spread(train: Train, world_size: int) -> Train:
    """The same samples per step over another number of ranks.

    Raises:
        UserError: they cannot be shared out.
    """
    samples = train.world_size * train.batch_size
    if samples % world_size:
        raise UserError(
            f"--world-size {world_size}: {samples} samples per step do not divide by it"
        )
    return train.model_copy(update={"world_size": world_size, "batch_size": samples // world_size})


def _measured(plans: list[RunPlan], path: Path) -> tuple[list[Record], dict[str, str]]:
    """The records of all plans, those in `path` taken as they are; and why runs failed."""
    revision, seconds = git_revision(), stopwatch()
    kept = read_records(path) if path.is_file() and not revision.endswith("+") else []
    known = {(r.params_hash, r.seed): r for r in kept if r.revision == revision}
    records: list[Record] = []
    failures: dict[str, str] = {}
    for done, plan in enumerate(plans, 1):
        if plan.run in failures:
            continue
        try:
            record = known.pop((plan.params_hash(), plan.seed), None) or _run(plan)
        except RunFailed as failure:
            failures[plan.run] = str(failure).strip().splitlines()[-1]
            continue
        records.append(record.model_copy(update={"run": plan.run}))
        write_records(path, [*records, *known.values()])
        say(
            f"benchmarks: {done} of {len(plans)}: {plan.run} seed {plan.seed}, W="
            f"{plan.train.world_size}: perplexity {record.val_ppl:.1f} ({seconds():.0f} s)"
        )
    return records, failures


def _run(plan: RunPlan) -> Record:
    with TemporaryDirectory(prefix="shardlab-benchmark-") as folder:
        return measure(plan, Path(folder))


def _table(records: list[Record], runs: list[str], baseline: str, world_size: int) -> str:
    compared = comparison(records, runs, baseline)
    headings = [
        "run",
        "strategy",
        "gradients, raw / wire",
        "all, raw / wire",
        PPL.title,
        f"{PPL_CHANGE.title}, %",
        "gradient error",
        f"{GOAL_RATIO:g}x at {100 * GOAL_CHANGE:g} %",
    ]
    rows = []
    for run, values in compared.iterrows():
        row = {**values.to_dict(), "run": run, "is_baseline": run == baseline}
        ratio = _gradient_ratio([record for record in records if record.run == run])
        rows.append(
            [
                str(run),
                str(row["strategy"]),
                figure(ratio),
                figure(row["compression_ratio"]),
                PPL.cell(row),
                PPL_CHANGE.cell(row),
                optional(row["grad_rel_error"]),
                ABSENT if row["is_baseline"] else _goal(ratio, row),
            ]
        )
    title = f"W={world_size}: against {baseline}, {records[0].steps} steps"
    return f"{title}\n\n{text_table(title, headings, rows).markdown()}"


def _gradient_ratio(records: list[Record]) -> float:
    """Of the sums over seeds."""
    raw, wire = (
        sum(record.ledger["gradients"][key] for record in records)
        for key in ("bytes_raw", "bytes_wire")
    )
    return raw / wire


def _goal(ratio: float, row: dict[str, float]) -> str:
    """Whether a run reaches the goal: by its mean alone, or by the whole interval."""
    if ratio < GOAL_RATIO or not row["ppl_ratio"] <= 1 + GOAL_CHANGE:
        return "no"
    return "yes" if row["ppl_ratio_high"] <= 1 + GOAL_CHANGE else "in the mean"


if __name__ == "__main__":
    main()
