"""Fit the performance model on a few timings, validate it on the others, and extrapolate."""

from pathlib import Path

from shardlab.core.progress import say
from shardlab.predict.results import predict, write_forecast
from shardlab.predict.settings import Forecast
from shardlab.results.calibration_record import Calibration
from shardlab.results.files import read_timings
from shardlab.results.result import only
from shardlab.results.settings import Timing
from shardlab.results.timing_result import TimingResult
from stages.sections import Sections

_FOLDER, _TIMINGS = Path("results/forecast"), Path("results/timings")


def main(params: Sections) -> None:
    """Write results/forecast: forecast.json and its tables as CSV."""
    options, timings = params("forecast", Forecast), params("timings", dict[str, Timing])
    calibration = Calibration.from_file("results/calibration.json", "run shardlab calibrate")
    timed = only(read_timings(_TIMINGS, timings), TimingResult)
    predicted = predict(calibration, timed, options)
    write_forecast(_FOLDER, predicted)
    for warning in predicted.warnings:
        say(f"forecast: warning: {warning}")
    if predicted.summary is not None:
        found = predicted.summary
        say(
            f"forecast: {found.runs} held-out runs: error {found.median:.1%} (median), "
            f"{found.worst:.1%} (worst)"
        )
