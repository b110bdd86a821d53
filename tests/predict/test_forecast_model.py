"""The fitted model: it recovers a known machine, predicts held-out runs, and knows its error."""

import numpy as np
import pytest

from shardlab.core.errors import UserError
from shardlab.predict.costs import MeasuredCosts
from shardlab.predict.extrapolation import (
    break_even,
    exposed_rate,
    extrapolate,
    with_own_cores,
)
from shardlab.predict.machine import fit_machine
from shardlab.predict.model import case_of, fit_model
from shardlab.predict.results import check, fitted_runs, summarize
from shardlab.predict.settings import Forecast
from shardlab.predict.step import step_seconds
from shardlab.results.timing_result import NO_COMMUNICATION
from tests.evidence_factory import make_forecast
from tests.predict.timing_factory import (
    MACHINE,
    MODEL,
    made_calibration,
    made_run,
    made_timings,
    predicted,
)

FORECAST = Forecast(
    timings=("one-rank", "two-ranks", "slow"),
    runs=("ddp", "fsdp2", "manual"),
    ranks=(8, 1024),
    links=("ethernet-10g", "dgx-h100"),
)
TIMINGS = made_timings()
STRATEGIES = [run for run in TIMINGS if run.run != NO_COMMUNICATION]


@pytest.fixture(scope="module")
def model():
    return fit_model(fit_machine(made_calibration()), fitted_runs(TIMINGS, FORECAST))


def test_fit_recovers_the_engine_overheads(model):
    for engine in ("ddp", "fsdp2", "manual"):
        assert model.launch_s[engine] == pytest.approx(MODEL.launch_s[engine], abs=2e-5)
    assert model.wait_s == pytest.approx(MODEL.wait_s, abs=2e-5)
    assert model.compute[2].forward == pytest.approx(MODEL.compute[2].forward)


def test_fitted_model_predicts_other_links_ranks_and_codecs(model):
    checks = check(STRATEGIES, fitted_runs(TIMINGS, FORECAST), model)
    held_out = {(each.timing, each.run) for each in checks if each.held_out}
    assert ("fast", "manual-int8") in held_out and ("four-ranks", "ddp") in held_out
    assert ("slow", "ddp") not in held_out
    summary = summarize(checks)
    assert summary is not None and summary.runs == len(held_out)
    assert summary.worst < 0.02


def test_one_run_is_enough_to_fit():
    runs = [made_run("two-ranks", name) for name in ("fsdp2", NO_COMMUNICATION)]
    model = fit_model(MACHINE, runs)
    assert predicted(model, runs[0]) == pytest.approx(predicted(MODEL, runs[0]), rel=1e-3)
    (only,) = check(runs[:1], runs, model)
    assert not only.held_out
    assert only.low_ms < 0.9 * only.predicted_ms  # nothing validates it
    assert summarize([only]) is None and summarize([]) is None


def test_prediction_reads_only_the_configuration_of_a_run(model):
    """A forecast must not use the measurement that it is validated against."""
    plain = made_run("fast", "manual", rate="1gbit")
    other = made_run("fast", "manual", rate="1gbit", step_ms=[1e6], bytes_wire=1e12)
    assert predicted(model, plain) == predicted(model, other)


def test_drift_between_timings_is_no_overhead_but_widens_the_interval(model):
    """A processor slower by a quarter during one of the fitted timings."""
    slow = MODEL._replace(compute={n: c.scaled(1.25) for n, c in MODEL.compute.items()})

    def drifted(run):
        if run.timing != "slow":
            return run
        alone = run.run == NO_COMMUNICATION
        step = sum(slow.compute[2]) if alone else predicted(slow, run)
        return run.model_copy(update={"step_ms": [1e3 * step] * 5})

    fitted = fit_model(MACHINE, [drifted(run) for run in fitted_runs(TIMINGS, FORECAST)])
    for engine, launch_s in model.launch_s.items():
        assert fitted.launch_s[engine] == pytest.approx(launch_s, abs=3e-5)
    assert fitted.half_width > 0.15 > model.half_width
    for run in (made_run("slow", "fsdp2-int8", rate="100mbit"), drifted(made_run("slow", "ddp"))):
        interval = fitted.estimate(*case_of(run))
        assert interval.low < 1e-3 * run.step_ms[0] < interval.high


def test_the_interval_is_students_of_what_the_fit_misses(model):
    """Nine runs less three engines and the wait leave five degrees of freedom."""
    assert model.half_width == 0.09  # the least, where all runs are fitted exactly
    factors = iter([1.3, 0.7, 1.2, 0.8, 1.25, 0.75, 1.3, 0.9, 0.7])
    noisy = [
        run.model_copy(update={"step_ms": [next(factors) * run.step_ms[0]]})
        if run.run != NO_COMMUNICATION
        else run
        for run in fitted_runs(TIMINGS, FORECAST)
    ]
    fitted = fit_model(MACHINE, noisy)
    runs = [run for run in noisy if run.run != NO_COMMUNICATION]
    errors = [1e3 * predicted(fitted, run) / run.step_ms[0] - 1 for run in runs]
    assert len(errors) == 9
    expected = 2.5706 * np.sqrt(np.square(errors).sum() / 5)  # t(0.975, 5) of printed tables
    assert fitted.half_width == pytest.approx(expected, rel=1e-4)


def test_one_long_step_of_a_timing_changes_nothing(model):
    """The step of a run is the median of its repetitions."""
    disturbed = [
        run.model_copy(update={"step_ms": [*run.step_ms[1:], 10 * run.step_ms[0]]})
        for run in fitted_runs(TIMINGS, FORECAST)
    ]
    fitted = fit_model(fit_machine(made_calibration()), disturbed)
    assert fitted.wait_s == pytest.approx(model.wait_s)
    assert fitted.compute[2].forward == pytest.approx(model.compute[2].forward)


def test_computation_is_that_of_ranks_with_cores_of_their_own():
    """Two ranks of two threads on two cores take twice as long as either would alone; timings
    without a fitted run tell nothing."""
    run = made_run("two-ranks", "fsdp2", threads=2)
    alone = made_run("two-ranks", NO_COMMUNICATION, threads=2, step_ms=[20.0])
    other = made_run("slow", NO_COMMUNICATION, step_ms=[90.0])
    fitted = fit_model(MACHINE, [run, alone, other])
    assert sum(fitted.compute[2]) == pytest.approx(0.010)


@pytest.mark.parametrize(
    ("runs", "complaint"),
    [
        (["ddp"], "none of them has steps without communication"),
        ([NO_COMMUNICATION], "forecast.runs: none of them is in forecast.timings"),
        ([NO_COMMUNICATION, "fsdp2-int8"], "forecast.runs: fsdp2-int8: its codec was not calib"),
    ],
)
def test_a_fit_that_is_impossible_is_refused(runs, complaint):
    machine = MACHINE._replace(codecs={})
    with pytest.raises(UserError, match=complaint):
        fit_model(machine, [made_run("two-ranks", run) for run in runs])


def test_an_engine_that_was_never_timed_gets_the_mean_of_the_others(model):
    run = made_run("two-ranks", "fsdp1")
    mean = np.mean([*model.launch_s.values()])
    assert predicted(model, run) == pytest.approx(
        predicted(model._replace(launch_s={"fsdp1": float(mean)}), run)
    )


def test_prediction_intervals_cover_what_is_measured():
    chance = np.random.default_rng(0)
    covered = []
    for _ in range(10):
        noisy = [
            run.model_copy(update={"step_ms": [run.step_ms[0] * (1 + chance.normal(scale=0.03))]})
            if run.run != NO_COMMUNICATION
            else run
            for run in TIMINGS
        ]
        known = fitted_runs(noisy, FORECAST)
        held = [run for run in noisy if run.run != NO_COMMUNICATION]
        summary = summarize(check(held, known, fit_model(MACHINE, known)))
        assert summary is not None
        covered.append(summary.within)
    assert 0.9 <= np.mean(covered) < 1


def test_steps_grow_with_ranks_on_a_cluster(model):
    runs = list({run.run: run for run in STRATEGIES}.values())
    points = extrapolate(runs, model, FORECAST.links, (8, 512, 16384))
    by_place: dict[tuple[str, str], list[float]] = {}
    for point in points:
        assert point.low_ms <= point.step_ms <= point.high_ms
        by_place.setdefault((point.run, point.link), []).append(point.step_ms)
    assert len(by_place) == 5 * 2
    assert all(steps == sorted(steps) for steps in by_place.values())


def test_step_times_are_equal_at_the_break_even_rate(model):
    coded = [made_run("x", name) for name in ("fsdp2-int8", "manual-int8")]
    bare = [made_run("x", name) for name in ("fsdp2-exchange", "manual")]
    rates = break_even([*coded, *bare], model)
    assert [rate.run for rate in rates] == ["fsdp2-int8", "manual-int8"]
    for rate, pair in zip(rates, zip(coded, bare, strict=True), strict=True):
        assert rate.step is not None
        costs = MeasuredCosts(model.machine, 2, 2, round(rate.step))
        costs.rank = costs.rank._replace(bucket_s=0.0)
        with_codec, without = (
            step_seconds(with_own_cores(case_of(run), model), costs) for run in pair
        )
        assert with_codec == pytest.approx(without, rel=1e-4)


def test_exposed_rate_solves_its_equation():
    (lines,) = MACHINE.codecs.values()
    n, ranks = 1e6, 4
    rate = exposed_rate(lines, n, ranks)
    raw = 4 * n * (ranks - 1) / ranks
    payload = (ranks - 1) * lines.payload.at(n / ranks)
    work = ranks * (lines.encode.at(n / ranks) + lines.decode.at(n / ranks))
    assert 8 * raw / rate == pytest.approx(8 * payload / rate + work)


def test_a_summary_is_of_the_absolute_errors_of_held_out_runs():
    (first, *_) = make_forecast(["ddp"]).checks
    facts = [(-0.3, True, 30.0), (0.1, True, 40.0), (0.2, True, 42.0), (-0.9, False, 40.0)]
    checks = [
        first.model_copy(update={"error": error, "held_out": held, "measured_ms": measured})
        for error, held, measured in facts
    ]
    found = summarize(checks)
    assert (found.runs, found.median, found.worst) == (3, 0.2, 0.3)
    # the interval is 39 to 41
    assert found.within == pytest.approx(1 / 3)


def test_repetitions_that_others_disturbed_change_no_fit(model):
    runs = [
        run.model_copy(update={"step_ms": [run.step_ms[0] / 3, *run.step_ms, run.step_ms[0] * 9]})
        for run in fitted_runs(TIMINGS, FORECAST)
    ]
    found = fit_model(fit_machine(made_calibration()), runs)
    for run in STRATEGIES:
        assert predicted(found, run) == pytest.approx(predicted(model, run), rel=1e-3)
