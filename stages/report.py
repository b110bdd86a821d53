"""Write the comparison: tables, plots and one HTML page."""

from pathlib import Path

from shardlab.config.parameters import Parameters
from shardlab.config.run_record import read_records
from shardlab.config.timing_record import read_all
from shardlab.core.files import read_json
from shardlab.core.progress import say
from shardlab.forecast.results import ForecastDocument
from shardlab.report.aggregate import select
from shardlab.report.collect import read_losses
from shardlab.report.evidence import Evidence
from shardlab.report.write import write_report
from shardlab.search.history import History
from stages.common import run

_RESULTS = Path("results")
_FOLDER = _RESULTS / "report"
_FORECAST = _RESULTS / "forecast" / "forecast.json"


def main(params: Parameters) -> None:
    """Write everything in results/report except readme.md."""
    strategies, seeds, timings, rounds = params("strategies", "seeds", "timings", "rounds")
    baseline, comparison, quality = params("baseline", "comparison", "quality")
    runs, last = [*strategies], [*rounds][-1]
    results, history = "results/results.jsonl", _RESULTS / "rounds" / str(last) / "history.json"
    evidence = Evidence(
        records=select(read_records(results), runs, seeds),
        baseline=baseline,
        losses={
            name: {seed: read_losses(_RESULTS, name, seed)["loss"] for seed in seeds}
            for name in runs
        },
        history=History.from_file(history, f"run python -m stages.decide {last}"),
        source=read_json("data/source.json", "run python -m stages.prepare"),
        statistics=read_json("data/statistics.json", "run python -m stages.tokenize"),
        timed=read_all(_RESULTS / "timings", timings),
        comparison=comparison,
        quality=quality,
        predicted=ForecastDocument.from_file(_FORECAST, "run python -m stages.forecast"),
    )
    write_report(evidence, _FOLDER)
    say(f"report: {_FOLDER / 'report.html'}")


if __name__ == "__main__":
    run(main)
