"""Break-even rates of codecs, time to quality by link, and the plots of timings and forecast."""

import math

import pytest

from shardlab.config.contention import Contention
from shardlab.config.schema import Quality
from shardlab.config.strategy import parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.report.plots import crossover_plot, forecast_plot
from shardlab.report.sections.forecast import forecast
from shardlab.report.sections.links import (
    codec_table,
    crossing,
    fastest,
    links,
    references,
    step_table,
    stops_paying,
)
from shardlab.report.sections.quality import quality_tables
from shardlab.report.tables import ABSENT, rate_text
from shardlab.report.timings import crossovers
from tests.evidence_factory import make_evidence, make_forecast
from tests.record_factory import BASELINE, STRATEGIES, make_losses, make_records
from tests.timed_run_factory import make_timed, make_timings

QUALITY = Quality(train_loss=(7.0, 1.0), time_s=(2.0,))


def by_quality(group, losses, quality=QUALITY):
    evidence = make_evidence(make_records([BASELINE]), losses=losses, quality=quality)
    return quality_tables(group, evidence)


def timed(rate, ranks=2, delay=0.0, **steps):
    """A timing on a link with given steps by run."""
    runs = []
    for run, step_ms in steps.items():
        name = {"int8": "fsdp2-int8", "exchange": "fsdp2-exchange"}.get(run, run)
        facts = {"bits_per_second": int(rate), "delay_ms": delay, "link": rate_text(rate)}
        runs.append(make_timed(f"at {rate} {ranks} {delay}", name, ranks, step_ms=step_ms, **facts))
    return runs


@pytest.mark.parametrize(
    ("curve", "rate"),
    [
        ([(1e8, 0.5), (1e9, 2.0)], math.sqrt(1e8 * 1e9)),
        ([(1e8, 0.5), (1e9, 1.0)], 1e9),
        ([(1e8, 0.5), (3e8, 0.5), (1e9, 2.0)], math.sqrt(3e8 * 1e9)),
        ([(1e8, 0.5), (1e9, 0.9)], math.inf),
        ([(1e8, 1.1), (1e9, 2.0)], 0.0),
        ([(1e8, 0.5)], math.inf),
        ([(1e8, 1.5)], 0.0),
        # noise: what counts is where it stays above
        ([(1e8, 0.9), (3e8, 1.1), (1e9, 0.8)], math.inf),
    ],
)
def test_crossing_is_interpolated_on_logarithmic_scales(curve, rate):
    assert crossing(curve) == pytest.approx(rate)


def test_break_even_rate_is_not_extrapolated():
    pays = crossovers(timed(1e8, exchange=[50.0] * 2, int8=[25.0] * 2))[0]
    assert stops_paying(pays, "fsdp2-int8", "fsdp2-exchange") == "above 100 Mbit/s"
    costs = crossovers(timed(1e8, exchange=[50.0] * 2, int8=[60.0] * 2))[0]
    assert stops_paying(costs, "fsdp2-int8", "fsdp2-exchange") == "below 100 Mbit/s"


def test_interval_of_the_break_even_rate_is_that_of_the_ratios():
    slow = timed(1e8, exchange=[100.0, 100.0, 100.0], int8=[40.0, 50.0, 62.5])
    fast = timed(1e9, exchange=[100.0, 100.0, 100.0], int8=[160.0, 200.0, 250.0])
    text = stops_paying(crossovers(slow + fast)[0], "fsdp2-int8", "fsdp2-exchange")
    rate, _, ends = text.partition(" (")
    assert rate == "316 Mbit/s"
    low, high = ends.rstrip(")").split(" to ")
    assert float(low.split()[0]) < 316 < float(high.split()[0])


def test_codec_is_compared_with_the_same_strategy_without_codec():
    group = crossovers(make_timings())[0]
    assert references(group) == {
        "ddp-int8": "ddp",
        **{f"fsdp2-{codec}": "fsdp2-exchange" for codec in ("bf16", "int8", "int4", "topk")},
    }


def test_run_with_different_sharding_is_no_reference():
    odd = parse_strategy({**STRATEGIES["fsdp2-int8"], "reshard_after_forward": False})
    runs = timed(1e8, exchange=[50.0], int8=[25.0])
    runs[1] = runs[1].model_copy(update={"strategy": odd.canonical().model_dump(mode="json")})
    group = crossovers(runs)[0]
    assert references(group) == {}
    assert codec_table(group).rows == []


def test_links_are_compared_at_equal_ranks_and_delay():
    runs = timed(1e9, fsdp2=[1.0]) + timed(1e8, fsdp2=[2.0]) + timed(1e8, 4, fsdp2=[3.0])
    runs += [*timed(1e8, 2, 5.0, fsdp2=[4.0]), make_timed("two-ranks")]
    groups = crossovers(runs)
    assert [group.title for group in groups] == ["2 ranks", "2 ranks, 5 ms of delay", "4 ranks"]
    # slowest first, without an emulated link last
    assert [t.link for t in groups[0].timings] == ["100 Mbit/s", "1 Gbit/s", "loopback"]
    assert [t.link for t in groups[0].measured] == ["100 Mbit/s", "1 Gbit/s"]


def test_timings_without_emulated_link_have_no_crossover():
    assert crossovers([make_timed("two-ranks"), make_timed("one-rank", world_size=1)]) == []


def test_fastest_run_is_never_the_no_communication_bound():
    runs = timed(1e8, fsdp2=[60.0], int8=[20.0]) + timed(1e9, fsdp2=[10.0], int8=[11.0])
    runs += [make_timed(runs[0].timing, NO_COMMUNICATION, step_ms=[1.0])]
    text = fastest(crossovers(runs)[0], BASELINE)
    assert "fsdp2-int8 (20.0 ms, 3.00 times as fast as fsdp2); " in text
    assert text.endswith("fsdp2 (10.0 ms).")


def test_every_run_has_a_row_and_its_ratio_on_every_link():
    table = step_table(crossovers(make_timings())[0], BASELINE)
    assert [row[0] for row in table.rows] == [*STRATEGIES, NO_COMMUNICATION]
    assert [table.rows[n][0] for n in table.highlighted] == [BASELINE]
    baseline = table.rows[table.highlighted[0]]
    assert baseline[2::2] == ["1", "1", "1"]


def test_run_not_timed_on_a_link_is_absent():
    runs = timed(1e8, fsdp2=[60.0], int8=[20.0]) + timed(1e9, fsdp2=[10.0])
    rows = {row[0]: row[1:] for row in step_table(crossovers(runs)[0], BASELINE).rows}
    assert rows["fsdp2-int8"] == ["20.0", "0.333", ABSENT, ABSENT]


def test_time_to_a_loss_is_steps_times_the_step_time_of_the_link():
    losses = {run: {0: make_losses(run, 0)} for run in ("fsdp2", "fsdp2-int8")}
    runs = timed(1e8, fsdp2=[1000.0], int8=[500.0])
    reached, after = by_quality(crossovers(runs)[0], losses)
    rows = {row[0]: row[1:] for row in reached.rows}
    steps, seconds, never, _ = rows["fsdp2"]
    assert float(steps) == pytest.approx(float(seconds), rel=0.01)
    assert float(rows["fsdp2-int8"][1]) == pytest.approx(float(rows["fsdp2-int8"][0]) / 2, rel=0.01)
    assert never == ABSENT
    # twice the steps in the same time
    assert float(dict(after.rows)["fsdp2-int8"]) < float(dict(after.rows)["fsdp2"])


def test_mean_is_absent_if_a_seed_does_not_reach_the_loss():
    losses = {"fsdp2": {0: {0: 8.0, 1: 6.0}, 1: {0: 8.0, 1: 7.5}}}
    table, _ = by_quality(crossovers(timed(1e8, fsdp2=[1000.0]))[0], losses)
    assert table.rows[0][1:3] == [ABSENT, ABSENT]


def test_untrained_runs_have_no_time_to_a_loss():
    group = crossovers(timed(1e8, fsdp2=[1000.0]))[0]
    assert by_quality(group, {}) == []
    assert by_quality(group, {"fsdp2": {0: {0: 1.0}}}, Quality()) == []


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1e8, "100 Mbit/s"), (1e9, "1 Gbit/s"), (2.5e9, "2.5 Gbit/s"), (5e5, "500 kbit/s")],
)
def test_rates_have_the_unit_that_fits(rate, text):
    assert rate_text(rate) == text


def test_crossover_plot_lists_runs_timed_on_links():
    runs = [make_timed("two-ranks", run) for run in (BASELINE, "ddp", NO_COMMUNICATION)]
    for rate in (1e8, 1e9):
        runs += timed(
            rate, **{BASELINE: [2.0, 2.1], "int8": [1.0, 1.1], NO_COMMUNICATION: [0.5, 0.6]}
        )
    names = [run.run for run in runs]
    figure = crossover_plot(crossovers(runs), names, [BASELINE], BASELINE)
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named == [BASELINE, "fsdp2-int8", NO_COMMUNICATION]


def test_loss_tables_are_limited_to_the_world_size_of_training():
    runs = timed(1e8, fsdp2=[60.0]) + timed(1e8, 4, fsdp2=[60.0])
    evidence = make_evidence(make_records([BASELINE]), timed=runs, quality=QUALITY)
    two, four = links(evidence).sections
    assert any("training loss" in table.title for table in two.tables)
    assert not any("training loss" in table.title for table in four.tables)


def test_interval_down_to_0_ms_is_clipped_to_its_panel():
    points = [p.model_copy(update={"low_ms": 0.0}) for p in make_forecast().points]
    figure = forecast_plot(points, [*STRATEGIES], BASELINE)
    for axes in figure.axes:
        _, top = axes.get_ylim()
        for band in axes.collections:
            highest = max(float(path.vertices[:, 1].max()) for path in band.get_paths())
            assert abs(highest - top) < 1e-6
    assert any(axes.collections for axes in figure.axes)


def test_a_disturbed_timing_is_marked_in_all_headings():
    runs = [*timed(1e8, ddp=[10.0, 10.0], int8=[5.0, 5.0]), *timed(1e9, ddp=[5.0, 5.0])]
    busy = {"foreign": 0.5, "stolen": 0.0}
    runs = [
        run.model_copy(update={"contention": Contention(**busy)})
        if run.bits_per_second == 1e9
        else run
        for run in runs
    ]
    [group] = crossovers(runs)
    table = step_table(group, BASELINE)
    headings = [column.heading for column in table.columns]
    assert headings[1::2] == ["100 Mbit/s, ms", "1 Gbit/s \N{DAGGER}, ms"]
    assert "others used more than" in table.note
    assert "others used" not in step_table(crossovers(runs[:2])[0], BASELINE).note
    assert "1 Gbit/s \N{DAGGER}: ddp" in fastest(group, BASELINE)


def forecast_with(**changes):
    return forecast(make_evidence(make_records(), predicted=make_forecast(**changes)))


def test_forecast_says_how_many_runs_and_bounds_it_is_fitted_on():
    fitted = ["one/ddp", f"one/{NO_COMMUNICATION}", "two/fsdp2", f"two/{NO_COMMUNICATION}"]
    (sentence,) = forecast_with(fitted_on=fitted).sentences
    assert sentence.startswith("The model is fitted on 2 timed runs and 2 no-communication bounds ")


@pytest.mark.parametrize(
    ("median", "worst", "said"),
    [
        (0.05, 0.15, "5.0 % (goal 5 %: met) and a worst of 15.0 % (goal 15 %: met)."),
        (0.06, 0.14, "6.0 % (goal 5 %: missed) and a worst of 14.0 % (goal 15 %: met)."),
        (0.04, 0.16, "4.0 % (goal 5 %: met) and a worst of 16.0 % (goal 15 %: missed)."),
    ],
)
def test_forecast_says_of_each_goal_whether_it_is_met(median, worst, said):
    summary = make_forecast().summary.model_copy(update={"median": median, "worst": worst})
    (sentence,) = forecast_with(summary=summary).sentences
    assert f"a median error of {said}" in sentence.replace("\N{NO-BREAK SPACE}", " ")
