"""Learns from a few timings, checks itself on the others, and looks further."""

from pathlib import Path

from shardlab.core.errors import UserError
from shardlab.core.progress import say
from shardlab.experiment.parameters import Parameters
from shardlab.forecast.results import foretell, write_forecast
from shardlab.measurements.calibration import read_calibration
from shardlab.measurements.timing import read_timing
from stages.common import run

_FOLDER, _TIMINGS = Path("results/forecast"), Path("results/timings")


def main(params: Parameters) -> None:
    """results/forecast: forecast.json, its tables as CSV, chakra.zip."""
    forecast, timings = params("forecast", "timings")
    calibration = Path("results/calibration.json")
    if not calibration.is_file():
        raise UserError(f"{calibration}: no such file: run python -m stages.calibrate")
    # by name: the order in which the parameters name them means nothing
    timed = [
        each for name in sorted(timings) for each in read_timing(_TIMINGS, name, timings[name])
    ]
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
