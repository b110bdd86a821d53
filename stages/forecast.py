"""Learns from a few timings, checks itself on the others, and looks further."""

from pathlib import Path

from shardlab.core.calibration import read_calibration
from shardlab.core.errors import UserError
from shardlab.core.parameters import Parameters
from shardlab.core.progress import say
from shardlab.core.timings import read_timings
from shardlab.forecast.results import foretell, write_forecast
from stages.common import run

_FOLDER = Path("results/forecast")


def main(params: Parameters) -> None:
    """results/forecast: forecast.json, its tables as CSV, chakra.zip."""
    forecast, timings = params("forecast", "timings")
    calibration = Path("results/calibration.json")
    files = {name: Path("results/timings", f"{name}.jsonl") for name in timings}
    stages = {calibration: "calibrate", **{file: f"timing {name}" for name, file in files.items()}}
    for file, stage in stages.items():
        if not file.is_file():
            raise UserError(f"{file}: no such file: run python -m stages.{stage}")
    timed = [each for file in files.values() for each in read_timings(file)]
    foretold, traces = foretell(read_calibration(calibration), timed, forecast)
    write_forecast(_FOLDER, foretold, traces)
    if foretold.summary is not None:
        found = foretold.summary
        say(
            f"forecast: {found.runs} runs that it had not seen: error {found.median:.1%} (median), "
            f"{found.worst:.1%} (worst)"
        )


if __name__ == "__main__":
    run(main)
