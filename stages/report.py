"""Write the comparison: tables, plots and one HTML page."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from shardlab.choose.history import History
from shardlab.core.errors import UserError
from shardlab.core.files import read_json
from shardlab.core.progress import say
from shardlab.predict.results import ForecastDocument
from shardlab.report.aggregate import select
from shardlab.report.evidence import Evidence, found_strategies
from shardlab.report.settings import Quality
from shardlab.report.tuned import Tuned
from shardlab.report.write import write_report
from shardlab.results.collect import read_losses
from shardlab.results.files import read_results, read_timings
from shardlab.results.result import Failure, only
from shardlab.results.settings import Timing
from shardlab.results.table import StrategyResults
from shardlab.results.timing_parts import turns
from shardlab.results.timing_result import TimingResult
from shardlab.results.tune_result import TuneResult
from shardlab.strategy.document import parse_strategy
from shardlab.train.settings import Train
from shardlab.train.tune_settings import Method, Tune
from stages.sections import Sections
from stages.summary import summarize

_RESULTS = Path("results")
_FOLDER = _RESULTS / "report"
_FORECAST = _RESULTS / "forecast" / "forecast.json"


def main(params: Sections) -> None:
    """Write everything in results/report; of runs that crashed their names."""
    seeds, timings = params("seeds", list[int]), params("timings", dict[str, Timing])
    baseline, comparison = params("baseline", str), params("comparison", str)
    last = max(params.plain("rounds"), key=int)
    results, history = "results/results.jsonl", _RESULTS / "rounds" / str(last) / "history.json"
    records = read_results(results, "run shardlab collect")
    steps = read_timings(_RESULTS / "timings", timings)
    timed, untimed = only(steps, TimingResult), only(steps, Failure)
    crashes = only(records, Failure)
    lost = {crash.run: crash.detail for crash in crashes}
    lost |= {run.run: run.detail for run in untimed if run.timing == comparison}
    if baseline in lost:
        raise UserError(f"baseline: run {baseline!r} crashed ({lost[baseline]}): name another run")
    runs = [run for run in params.plain("strategies") if run not in lost]
    searched = History.from_file(history, f"run shardlab decide {last}")
    found = found_strategies(searched, {*runs, *(run.run for run in timed)})
    curves = {
        name: {seed: read_losses(_RESULTS, name, seed) for seed in seeds} for name in runs
    } | {name: _losses_of(row) for name, row in found.items()}
    evidence = Evidence(
        records=select(records, runs, seeds),
        baseline=baseline,
        losses={
            name: {seed: curve["loss"] for seed, curve in by_seed.items()}
            for name, by_seed in curves.items()
        },
        validation=_validation_of(curves),
        history=searched,
        source=read_json("data/source.json", "run shardlab prepare"),
        statistics=read_json("data/statistics.json", "run shardlab tokenize"),
        timed=timed,
        turns=turns(timings),
        comparison=comparison,
        quality=params("quality", Quality),
        tolerance=params(f"rounds.{last}.agent.quality_tolerance", float),
        is_searched=params(f"rounds.{last}.agent.budget", int) > 0,
        predicted=ForecastDocument.from_file(_FORECAST, "run shardlab forecast"),
        tuned=tuned_of(params, _RESULTS),
        crashed=[
            *(f"{crash.run} in training, seed {crash.seed}: {crash.detail}" for crash in crashes),
            *(f"{run.run} in timing {run.timing}: {run.detail}" for run in untimed),
        ],
        lost={*lost},
    )
    write_report(evidence, _FOLDER)
    if "DVC_STAGE" in os.environ:  # which has no other place to call us after its last stage
        print(summarize(os.getppid()), file=sys.stderr)
    say(f"report: {_FOLDER / 'report.html'}")


def tuned_of(params: Sections, results: Path) -> Tuned | None:
    """Return what was tuned; None where nothing was.

    Args:
        results: folder with tune/.

    Raises:
        UserError: a file there is missing, or that of another method.
    """
    tune = params("tune", Tune | None)
    if tune is None:
        return None
    methods = params("methods", dict[str, Method])
    documents = params.plain("strategies") | params.plain("timed_strategies")
    strategies = {name: parse_strategy(document) for name, document in documents.items()}
    rows = []
    for name, method in methods.items():
        trained = strategies[method.strategies[0]].hash()
        rows += _tuned_rows(results / "tune" / f"{name}.jsonl", name, trained)
    train = params("train", Train, "accumulation", "betas", "steps", "world_size", "untimed_steps")
    seeds, baseline = params("seeds", list[int]), params("baseline", str)
    return Tuned(tune, methods, strategies, train, seeds, baseline, rows)


def _tuned_rows(path: Path, method: str, strategy_hash: str) -> list[TuneResult]:
    fix = f"run shardlab tune {method}"
    rows = read_results(path, fix)
    tuned = only(rows, TuneResult)
    # a copy under another name, or the search of other parameters
    if len(tuned) < len(rows) or {(row.run, row.strategy_hash) for row in tuned} - {
        (method, strategy_hash)
    }:
        raise UserError(f"{path}: has other runs than methods.{method}: {fix}")
    return tuned


def _validation_of(
    curves: Mapping[str, Mapping[int, pd.DataFrame]],
) -> dict[str, dict[int, pd.Series]]:
    """Return the validation losses by the number of steps done; empty where nothing was
    evaluated."""
    if not any(curve["evaluated"].any() for seeds in curves.values() for curve in seeds.values()):
        return {}
    return {
        run: {
            seed: curve.loc[curve["evaluated"], "val_loss"].rename(index=lambda step: step + 1)
            for seed, curve in seeds.items()
        }
        for run, seeds in curves.items()
    }


def _losses_of(row: StrategyResults) -> dict[int, pd.DataFrame]:
    """Return by seed the losses of a strategy that a round has trained."""
    assert row.files is not None, "a round has trained it"
    runs = Path(row.files)
    fix = f"run shardlab trial {runs.parent.name}"
    return {record.seed: read_losses(runs, record.run, record.seed, fix) for record in row.trained}
