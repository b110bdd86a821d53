"""The table of measurements, and steps over those of a reference in the same timing."""

import math

import pytest

from shardlab.results.interval import paired_ratio
from shardlab.results.table import SearchWorkload, ratio_to, results_by_strategy
from shardlab.results.timing_result import NO_COMMUNICATION, TimingResult
from shardlab.strategy.document import parse_strategy
from tests.record_factory import STRATEGIES, in_round, make_failure, make_record, trial_run
from tests.timed_run_factory import make_timed

DDP, FSDP2 = (parse_strategy(STRATEGIES[run]) for run in ("ddp", "fsdp2"))
KEPT = parse_strategy({"reshard_after_forward": False})
LOAD = SearchWorkload(
    model="tiny",
    parameters=1_312_000,
    world_size=2,
    trained_on=2,
    sequence_length=64,
    batch_size=8,
    accumulation=1,
    link="loopback",
)


def raced(strategy, step_ms, number=1):
    return make_timed("race", step_ms=step_ms).model_copy(update=in_round(strategy, number, "race"))


def test_a_ratio_pairs_the_repetitions_that_both_have():
    long, short = [40.0, 50.0, 42.0, 48.0, 44.0, 46.0], [20.0, 24.0, 22.0]
    runs = [make_timed("slow", "fsdp2", step_ms=long), make_timed("slow", "ddp", step_ms=short)]
    for reference in ("fsdp2", FSDP2.hash()):
        [(baseline, unit), (result, ratio)] = ratio_to(runs, reference)
        assert [baseline.run, result.run] == ["fsdp2", "ddp"]
        assert (unit.ratio, unit.low, unit.high) == (1, 1, 1)
        expected = paired_ratio(short, long[:3])
        assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx(expected)
        assert (ratio.source, ratio.link, ratio.world_size) == ("timing slow", "100mbit", 2)
        assert ratio.repetitions == 3


def test_pauses_are_no_repetitions():
    steps = [40.0, 41.0, 39.0, 40.0, 42.0, 38.0]
    paused = [20.0, 20.5, 9000.0, 20.0, 21.0, 19.0]
    runs = [make_timed("slow", "fsdp2", step_ms=steps), make_timed("slow", "ddp", step_ms=paused)]
    [_, (_, ratio)] = ratio_to(runs, "fsdp2")
    assert ratio.repetitions == 5
    assert ratio.ratio == pytest.approx(0.5)


def test_timings_without_the_reference_and_a_single_repetition_say_nothing():
    assert ratio_to([make_timed("slow", "ddp")], "fsdp2") == []
    assert ratio_to([], "fsdp2") == []
    runs = [make_timed("slow", run, step_ms=[40.0]) for run in ("fsdp2", "ddp")]
    [_, (_, ratio)] = ratio_to(runs, "fsdp2")
    assert ratio.ratio == 1 and math.isnan(ratio.low) and math.isnan(ratio.high)


def test_a_row_has_the_results_of_a_strategy_from_all_measurements():
    results = [
        *(make_record(run, seed) for run in ("fsdp2", "ddp") for seed in (1, 0)),
        *(
            make_timed("slow", run, step_ms=[ms] * 3)
            for run, ms in (("fsdp2", 50.0), ("ddp", 25.0))
        ),
        make_timed("alone", "ddp"),
        raced(FSDP2, [40.0] * 3),
        raced(DDP, [30.0] * 3),
        raced(KEPT, [60.0] * 3),
        make_timed("race", NO_COMMUNICATION).model_copy(
            update={"kind": "race", "timing": "round-1"}
        ),
        trial_run(KEPT, 0),
    ]
    rows = results_by_strategy(results, FSDP2.hash())
    assert [row.source for row in rows.values()] == ["run fsdp2", "run ddp", "round 1"]
    ddp, row = rows[DDP.hash()], rows[KEPT.hash()]
    assert [(step.source, step.ratio) for step in ddp.steps] == [
        ("timing slow", pytest.approx(0.5)),
        ("round 1", pytest.approx(0.75)),
    ]
    assert [run.seed for run in ddp.trained] == [0, 1]
    assert (ddp.files, ddp.folder) == (None, "results/train/ddp")
    assert row.folder == f"results/rounds/1/runs/train/{KEPT.hash()}"
    assert [step.ratio for step in row.steps] == pytest.approx([1.5])


def test_a_seed_that_fails_leaves_a_row_without_training_runs():
    lost = make_record("ddp", 1, diverged_at=7, val_ppl=None)
    crash = make_failure(KEPT, "memory", "no memory", seed=1)
    results = [make_record("fsdp2"), make_record("ddp", 0), lost, trial_run(KEPT, 0), crash]
    rows = results_by_strategy(results, FSDP2.hash())
    for strategy, detail in ((DDP, "diverged at step 7"), (KEPT, "no memory")):
        row = rows[strategy.hash()]
        assert not row.trained and row.folder is None
        assert [failure.detail for failure in row.failures] == [f"seed 1: {detail}"]
    assert rows[DDP.hash()].diverged and not rows[KEPT.hash()].diverged


def test_steps_and_failures_count_on_their_link_and_ranks_and_those_of_training_wherever_it_was():
    crash = make_failure(DDP, "crash", kind="race", timing="round-1", link="100mbit")
    steps: list[TimingResult] = [raced(s, [40.0, 41.0]) for s in (FSDP2, DDP)]
    row = results_by_strategy([*steps, crash], FSDP2.hash())[DDP.hash()]
    slow = LOAD.model_copy(update={"link": "100mbit"})
    assert row.step(LOAD) and not row.step(slow)
    assert row.failure(slow) and not row.failure(LOAD)
    untrained = results_by_strategy([make_failure(DDP, "crash")], FSDP2.hash())[DDP.hash()]
    assert untrained.failure(LOAD) and untrained.failure(slow)
    other = LOAD.model_copy(update={"trained_on": 4, "world_size": 4})
    assert not untrained.failure(other)
    diverged = results_by_strategy([make_failure(DDP, "diverged")], FSDP2.hash())[DDP.hash()]
    assert diverged.failure(other)
