"""Join the measurements and estimates of every run and seed into one record each."""

from pathlib import Path

from shardlab.core.progress import say
from shardlab.models.settings import Model
from shardlab.results.collect import join_record, read_estimates, write_csv
from shardlab.results.files import read_timings, write_results
from shardlab.results.result import Failure, only
from shardlab.results.settings import Timing
from shardlab.results.timing_result import TimingResult
from shardlab.results.train_result import TrainResult
from shardlab.strategy.document import Strategy
from shardlab.train.plans import RunPlan
from shardlab.train.settings import Train
from stages.sections import Sections

_RESULTS = Path("results")


def main(params: Sections) -> None:
    """Write results/results.jsonl, and the same columns to results/results.csv, which has no line
    for a run that crashed."""
    strategies = params("strategies", dict[str, Strategy])
    seeds, timings = params("seeds", list[int]), params("timings", dict[str, Timing])
    # to refuse results of others, as of a stage that was typed with --set
    train, model = params("train", Train), params("model", Model)
    runs = sorted(strategies)
    timed = only(read_timings(_RESULTS / "timings", timings), TimingResult)
    estimates = read_estimates(_RESULTS / "memory.json", runs)
    lines = [
        join_record(
            _RESULTS,
            name,
            seed,
            params_hash=RunPlan(name, seed, strategies[name], train, model).params_hash(),
            timed=timed,
            estimate=estimates[name],
        )
        for name in runs
        for seed in seeds
    ]
    write_results(_RESULTS / "results.jsonl", lines)
    records = [line for line in lines if isinstance(line, TrainResult)]
    write_csv(_RESULTS / "results.csv", records)
    say(f"collect: {len(records)} records of {len(runs)} runs in {_RESULTS / 'results.jsonl'}")
    for crash in lines:
        if isinstance(crash, Failure):
            say(f"collect: {crash.run} seed {crash.seed} crashed: {crash.detail}")
