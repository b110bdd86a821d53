"""The plot of the forecast."""

from shardlab.report.plots import forecast_plot
from tests.evidence_factory import make_forecast
from tests.record_factory import BASELINE, STRATEGIES


def test_an_interval_that_begins_at_no_time_reaches_the_top_of_its_panel():
    points = [p.model_copy(update={"low_ms": 0.0}) for p in make_forecast().points]
    figure = forecast_plot(points, [*STRATEGIES], BASELINE)
    for axes in figure.axes:
        _, top = axes.get_ylim()
        for band in axes.collections:
            highest = max(float(path.vertices[:, 1].max()) for path in band.get_paths())
            assert abs(highest - top) < 1e-6
    assert any(axes.collections for axes in figure.axes)
