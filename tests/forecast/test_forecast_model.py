import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.config.schema import Forecast
from shardlab.config.strategy import parse_strategy
from shardlab.config.timing_record import NO_COMMUNICATION
from shardlab.core.errors import UserError
from shardlab.forecast.bounds import Speed
from shardlab.forecast.check import (
    check,
    first_of_each,
    fitted_runs,
    summarize,
    unknown,
)
from shardlab.forecast.costs import Measured
from shardlab.forecast.extrapolation import (
    break_even,
    by_itself,
    exposed_rate,
    extrapolate,
)
from shardlab.forecast.machine import fit_machine
from shardlab.forecast.model import fit_model
from shardlab.forecast.overheads import Engines
from shardlab.forecast.recomputation import Recomputation
from shardlab.forecast.step import step_seconds
from shardlab.forecast.uncertainty import estimate, propagate
from shardlab.forecast.workload import case_of, strategy_of
from tests.forecast.timing_factory import (
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


@pytest.fixture(scope="module")
def model():
    return fit_model(fit_machine(made_calibration()), fitted_runs(TIMINGS, FORECAST))


def test_fit_recovers_the_engine_overheads(model):
    for engine in ("ddp", "fsdp2", "manual"):
        assert model.engines.work[engine] == pytest.approx(MODEL.engines.work[engine], abs=2e-5)
    assert model.engines.wait == pytest.approx(MODEL.engines.wait, abs=2e-5)
    assert model.engines.noise < 1e-4
    assert model.compute[2].forward == pytest.approx(MODEL.compute[2].forward)


def test_fitted_model_predicts_other_links_ranks_and_codecs(model):
    checks = check(TIMINGS, fitted_runs(TIMINGS, FORECAST), model)
    held_out = {(each.timing, each.run) for each in checks if each.held_out}
    assert ("fast", "manual-int8") in held_out and ("four-ranks", "ddp") in held_out
    assert ("slow", "ddp") not in held_out
    found = summarize(checks)
    assert found is not None and found.runs == len(held_out)
    assert found.worst < 0.01


def test_one_run_is_enough_to_fit():
    runs = [made_run("two-ranks", name) for name in ("fsdp2", NO_COMMUNICATION)]
    model = fit_model(MACHINE, runs)
    assert predicted(model, runs[0]) == pytest.approx(predicted(MODEL, runs[0]), rel=1e-3)
    (found,) = check(runs, runs, model)
    assert not found.held_out
    assert summarize([found]) is None and summarize([]) is None


def test_prediction_reads_only_the_configuration_of_a_run(model):
    """A forecast must not use the measurement that it is validated against."""
    plain = made_run("fast", "manual", rate="1gbit")
    other = made_run("fast", "manual", rate="1gbit", step_ms=[1e6], bytes_wire=1e12)
    assert predicted(model, plain) == predicted(model, other)


def test_error_of_communication_is_free_of_machine_drift(model):
    """Twice as slow a machine during one timing: the error at its own speed stays small."""
    slow = MODEL.at(Speed(2.0))
    runs = [made_run("fast", "ddp", rate="1gbit"), made_run("fast", NO_COMMUNICATION, rate="1gbit")]
    step = 1e3 * predicted(slow, runs[0])
    alone = 1e3 * sum(slow.compute[2])
    drifted = [
        run.model_copy(update={"step_ms": [ms]})
        for run, ms in zip(runs, (step, alone), strict=True)
    ]
    (found,) = check(drifted, [], model)
    assert found.error < -0.3
    assert abs(found.error_of_communication) < 0.01


def test_drift_between_timings_is_no_overhead_but_widens_the_interval(model):
    """A processor slower by a quarter during one of the fitted timings."""
    slow = MODEL._replace(compute={n: each.scaled(1.25) for n, each in MODEL.compute.items()})
    known = [run for run in fitted_runs(TIMINGS, FORECAST) if run.timing in FORECAST.timings]

    def drifted(run):
        if run.timing != "slow":
            return run
        alone = run.run == NO_COMMUNICATION
        step = sum(slow.compute[2]) if alone else predicted(slow, run)
        return run.model_copy(update={"step_ms": [1e3 * step] * 5})

    fitted = fit_model(MACHINE, [drifted(run) for run in known])
    for engine, work in model.engines.work.items():
        assert fitted.engines.work[engine] == pytest.approx(work, abs=3e-5)
    assert fitted.engines.noise < 1e-4
    assert fitted.speed.drift == pytest.approx(1.5**0.5 * 0.25 / 2**0.5 / 1.125, rel=0.01)
    for run in (made_run("slow", "fsdp2-int8", rate="100mbit"), drifted(made_run("slow", "ddp"))):
        found = estimate(fitted, *case_of(run))
        assert found.low < 1e-3 * run.step_ms[0] < found.high


def test_a_timing_is_predicted_without_its_own_bound():
    """Whatever it measured, the prediction and the interval of a held-out timing are the same;
    those of the others follow it."""
    known = fitted_runs(TIMINGS, FORECAST)

    def checks(factor):
        changed = [
            run.model_copy(update={"step_ms": [factor * ms for ms in run.step_ms]})
            if (run.timing, run.run) == ("fast", NO_COMMUNICATION)
            else run
            for run in TIMINGS
        ]
        known = fitted_runs(changed, FORECAST)
        found = check(changed, known, fit_model(MACHINE, known))
        return {(each.timing, each.run): each for each in found}

    calm, slow = checks(1.0), checks(1.5)
    assert {run.timing for run in known} == {run.timing for run in TIMINGS}
    for key, each in slow.items():
        before = calm[key]
        same = each.high_ms == pytest.approx(before.high_ms, rel=1e-6)
        assert same == (each.timing == "fast") and same == (
            each.predicted_ms == pytest.approx(before.predicted_ms, rel=1e-6)
        )
    assert slow["four-ranks", "ddp"].high_ms > 1.2 * slow["four-ranks", "ddp"].predicted_ms


@given(st.floats(0.2, 5.0), st.floats(0.2, 5.0))
def test_the_speed_of_a_machine_scales_all_but_the_link(first, then):
    once, twice = MODEL.at(Speed(then)), MODEL.at(Speed(first)).at(Speed(then))
    for name in ("ddp", "fsdp2-int8", "slide"):
        here, linked = made_run("x", name), made_run("x", name, rate="100mbit")
        assert predicted(twice, here) == pytest.approx(predicted(once, here))
        assert predicted(once, here) == pytest.approx(then * predicted(MODEL, here))
        assert predicted(once, linked) <= max(then, 1.0) * predicted(MODEL, linked) * (1 + 1e-9)


def test_fit_without_no_communication_steps_is_refused():
    some = [run for run in fitted_runs(TIMINGS, FORECAST) if run.run != NO_COMMUNICATION]
    with pytest.raises(UserError, match="none of them has steps without communication"):
        fit_model(MACHINE, some)


def test_an_engine_that_was_never_timed_is_predicted_with_a_wide_interval(model):
    """By the mean overhead of the others; the interval holds what the dearest of them costs."""
    odd = made_run("fast", "fsdp1", rate="1gbit")
    assert unknown([*TIMINGS, odd], model) == {}
    found = estimate(model, *case_of(odd))
    works = model.engines.work
    for cost in (*works.values(), 0.0):
        alike = model._replace(engines=model.engines._replace(work={**works, "fsdp1": cost}))
        assert found.low <= predicted(alike, odd) <= found.high
    timed = fit_model(MACHINE, [*fitted_runs(TIMINGS, FORECAST), odd])
    sure = estimate(timed, *case_of(odd))
    assert sure.high - sure.low < 0.5 * (found.high - found.low)
    nothing = model._replace(engines=Engines({}, 0.0))
    assert unknown([odd], nothing) == {"fsdp1": "the model was fitted on no run of any engine"}


def test_unsupported_strategy_is_refused_in_the_fit_and_left_out_of_predictions(model):
    off = {"engine": "fsdp2", "offload": True}
    run = made_run("two-ranks", "fsdp2")
    loaded = run.model_copy(update={"run": "off", "strategy": off})
    assert model.obstacle(strategy_of(loaded)) == "the model does not support offload"
    narrow = parse_strategy({"engine": "fsdp2", "param_dtype": "bf16"}).canonical()
    assert model.obstacle(narrow) == "computation in bf16 was not timed"
    with pytest.raises(UserError, match=r"forecast\.runs: off: the model does not support offload"):
        fit_model(MACHINE, [loaded, made_run("two-ranks", NO_COMMUNICATION)])
    bare = MODEL._replace(machine=MACHINE._replace(codecs={}))
    assert bare.obstacle(strategy_of(made_run("x", "fsdp2-int8"))) == "its codec was not calibrated"


def test_covariance_of_the_fits_widens_the_interval(model):
    case = case_of(made_run("fast", "fsdp2", rate="1gbit"))
    sure = propagate(lambda m: m.predict(*case), MODEL)
    assert sure.low == pytest.approx(sure.high)
    work, wait = MODEL.engines.work, MODEL.engines.wait
    # of every engine by itself, though only one is asked for
    spread = np.diag([1e-10] * len(work) + [1e-8])
    engines = Engines(work, wait, tuple(map(tuple, spread.tolist())))
    found = propagate(lambda m: m.predict(*case), MODEL._replace(engines=engines))
    # nine collectives wait and ten compute: each adds one standard deviation per collective
    assert found.high - found.value == pytest.approx(1.96 * math.hypot(9e-4, 9e-5), rel=0.05)
    assert found.value - found.low == pytest.approx(found.high - found.value)
    noisy = propagate(lambda m: m.predict(*case), MODEL, noise=1e-3)
    assert noisy.high - noisy.value == pytest.approx(1.96e-3, rel=1e-4)
    # of an absolute and a relative error the larger counts
    step = noisy.value
    for relative, larger in ((0.5e-3 / step, noisy), (2e-3 / step, None)):
        both = propagate(lambda m: m.predict(*case), MODEL, noise=1e-3, relative=relative)
        alone = propagate(lambda m: m.predict(*case), MODEL, noise=relative * step)
        assert both == pytest.approx(larger or alone)


def test_prediction_intervals_have_their_nominal_coverage():
    chance = np.random.default_rng(0)
    held = []
    for _ in range(10):
        noisy = [
            run.model_copy(update={"step_ms": [run.step_ms[0] + chance.normal(scale=1.0)]})
            if run.run != NO_COMMUNICATION
            else run
            for run in TIMINGS
        ]
        known = fitted_runs(noisy, FORECAST)
        found = summarize(check(noisy, known, fit_model(MACHINE, known)))
        assert found is not None
        held.append(found.within)
    # nine runs leave five degrees of freedom: 95 % of a normal distribution are 89 % of Student's
    assert 0.85 < np.mean(held) <= 1


def test_step_time_grows_with_ranks_on_a_cluster(model):
    points = extrapolate(first_of_each(TIMINGS, []), model, FORECAST.links, (8, 512, 16384))
    by_place: dict[tuple[str, str], list[float]] = {}
    for point in points:
        assert point.low_ms <= point.step_ms <= point.high_ms
        by_place.setdefault((point.run, point.link), []).append(point.step_ms)
    assert len(by_place) == 5 * 2
    assert all(steps == sorted(steps) for steps in by_place.values())


def test_extrapolated_reduce_scatter_is_not_an_all_reduce(model):
    """gloo's reduce-scatter sends twice the bytes; on a cluster fsdp2's own is no slower than an
    exchange."""
    steps = {
        name: extrapolate([made_run("x", name)], model, ["dgx-h100"], [8])[0].step_ms
        for name in ("fsdp2", "fsdp2-exchange")
    }
    assert steps["fsdp2"] <= steps["fsdp2-exchange"] * (1 + 1e-9)


def test_step_times_are_equal_at_the_break_even_rate(model):
    runs = [made_run("x", name) for name in ("fsdp2-int8", "manual-int8", "fsdp2-exchange")]
    found = break_even(runs, model)
    assert [each.run for each in found] == ["fsdp2-int8", "manual-int8"]
    for each, run in zip(found, runs, strict=False):
        assert each.step is not None
        bare = made_run(
            "x", each.run.replace("fsdp2-int8", "fsdp2-exchange").replace("manual-int8", "manual")
        )
        costs = Measured(model.machine, 2, 2, round(each.step))
        coded, plain = (step_seconds(by_itself(case_of(r), model), costs) for r in (run, bare))
        assert coded == pytest.approx(plain, rel=1e-4)


def test_exposed_rate_solves_its_equation():
    (lines,) = MACHINE.codecs.values()
    n, ranks = 1e6, 4
    rate = exposed_rate(lines, n, ranks)
    raw = 4 * n * (ranks - 1) / ranks
    payload = (ranks - 1) * lines.payload.at(n / ranks)
    work = ranks * (lines.encode.at(n / ranks) + lines.decode.at(n / ranks))
    assert 8 * raw / rate == pytest.approx(8 * payload / rate + work)


def checkpointed(engine, mode, **changes):
    """A made run whose blocks are checkpointed."""
    strategy = parse_strategy({"engine": engine, "activation_checkpointing": mode}).canonical()
    settings = {"strategy": strategy.model_dump(mode="json"), "run": f"{engine}-{mode}"}
    return made_run("two-ranks", engine).model_copy(update={**settings, **changes})


@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2", "manual", "slide"])
def test_selective_checkpointing_adds_its_share_of_what_full_adds(engine):
    """Nothing at 0, what full checkpointing adds at 1, more where dispatch costs more."""
    plain, full = (predicted(MODEL, checkpointed(engine, mode)) for mode in ("none", "full"))
    steps = [
        predicted(
            MODEL._replace(recomputation=Recomputation(share)), checkpointed(engine, "selective")
        )
        for share in (0.0, 0.3, 0.6, 1.0, 1.35)
    ]
    assert (steps[0], steps[3]) == pytest.approx((plain, full))
    assert steps == sorted(steps) and plain < full < steps[-1]


@pytest.mark.parametrize("share", [0.4, 1.35])
def test_selective_checkpointing_is_fitted_on_timed_runs_or_left_out(model, share):
    true = MODEL._replace(recomputation=Recomputation(share))
    unseen = checkpointed("manual", "selective")
    assert "was in no run that the model was fitted on" in str(model.obstacle(strategy_of(unseen)))
    run = checkpointed("fsdp2", "selective")
    timed = run.model_copy(update={"step_ms": [1e3 * predicted(true, run)] * 5})
    known = fitted_runs(TIMINGS, FORECAST)
    fitted = fit_model(MACHINE, [*known, timed])
    assert fitted.engines.work == pytest.approx(model.engines.work, abs=1e-6)
    assert fitted.recomputation.selective == pytest.approx(share, abs=0.02)
    assert fitted.obstacle(strategy_of(unseen)) is None
    assert predicted(fitted, unseen) == pytest.approx(predicted(true, unseen), rel=0.01)
    # two timings that disagree: the interval of what was not timed holds both
    longer = timed.model_copy(update={"step_ms": [1.2 * timed.step_ms[0]] * 5})
    unsure = fit_model(MACHINE, [*known, timed, longer])
    found = estimate(unsure, *case_of(run))
    assert found.low < 1e-3 * timed.step_ms[0] and 1e-3 * longer.step_ms[0] < found.high
