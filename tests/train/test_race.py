"""Races on real ranks: arms leave, fail and hang, and the others are timed all the same."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import shardlab.train.blame as blame
from shardlab.core.errors import UserError
from shardlab.models.settings import Model
from shardlab.results.settings import Timing
from shardlab.results.timing_result import BLOCK, NO_COMMUNICATION, Race, RaceDecision
from shardlab.strategy.document import parse_strategy
from shardlab.train.interleaved import Look
from shardlab.train.launch import RunFailed
from shardlab.train.plans import TimingPlan
from shardlab.train.race import race
from shardlab.train.settings import Train
from tests.train.faulty_arms import on_rank, poison, raises, refuses

STRATEGIES = {
    "ddp": parse_strategy({"engine": "ddp"}),
    "manual": parse_strategy({"engine": "manual"}),
    "int8": parse_strategy({"engine": "ddp", "gradients": {"codec": "int8"}}),
}
TIMEOUT_S = 4
"""of a rank that waits for one that hangs"""
LIMIT_S = 120.0


def plan(data: Path, *runs: str, blocks: int = 1, **train: object) -> TimingPlan:
    values = {"batch_size": 2, "sequence_length": 16, "profiled_steps": 1, "timeout_s": TIMEOUT_S}
    return TimingPlan(
        "round-1",
        Timing(runs=runs or tuple(STRATEGIES), repetitions=blocks * BLOCK),
        STRATEGIES,
        Train(**{**values, **train}),
        Model(preset="tiny"),
        data,
        kind="race",
    )


def on(step_ms: dict[str, list[float]]) -> RaceDecision:
    return RaceDecision()


def raced(planned: TimingPlan, folder: Path, look: Look = on, limit_s: float = LIMIT_S) -> Race:
    output = folder / "race.json"
    race(planned, output, look, limit_s)
    return Race.from_file(output, "race again")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Race:
    return raced(plan(data, blocks=2), tmp_path_factory.mktemp("race"))


@pytest.mark.long
def test_a_race_that_nothing_stops_is_a_timing(whole):
    assert whole.reason == f"all of {2 * BLOCK} repetitions"
    assert [run.run for run in whole.runs] == [*STRATEGIES, NO_COMMUNICATION]
    assert all(len(run.step_ms) == 2 * BLOCK for run in whole.runs)
    assert whole.incumbent == "ddp"
    assert whole.failures == []
    assert whole.seconds > 0
    coded = {run.run: run for run in whole.runs}["int8"]
    assert coded.bytes_raw / coded.bytes_wire > 3.5


def test_equal_numerics_have_equal_losses_and_lossy_ones_have_not(whole):
    losses = {run.run: run.losses for run in whole.runs}
    assert len(losses["ddp"]) == 10
    assert losses["manual"] == pytest.approx(losses["ddp"], rel=1e-5)
    assert losses["int8"][0] == pytest.approx(losses["ddp"][0], rel=1e-6)
    assert losses["int8"] != pytest.approx(losses["ddp"], rel=1e-5)


@pytest.mark.long
def test_a_look_stops_the_race_and_lets_arms_leave(data, tmp_path):
    def look(step_ms):
        assert {len(times) for times in step_ms.values()} == {BLOCK} or len(step_ms["ddp"]) > BLOCK
        if len(step_ms["ddp"]) == 2 * BLOCK:
            return RaceDecision("enough")
        return RaceDecision(leave=("manual",))

    planned = plan(data)
    longer = replace(planned, timing=planned.timing.model_copy(update={"repetitions": 50}))
    found = raced(longer, tmp_path, look)
    assert found.reason == "enough"
    steps = {run.run: len(run.step_ms) for run in found.runs}
    assert steps == {"ddp": 20, "manual": 10, "int8": 20, NO_COMMUNICATION: 20}


@pytest.mark.parametrize(
    ("rank", "at", "fault", "outcome", "detail"),
    [
        (0, 7, raises, "crash", "rank 0: ArithmeticError: wrong on purpose"),
        pytest.param(
            *(1, 3, lambda: os.kill(os.getpid(), signal.SIGKILL), "memory", "SIGKILL"),
            marks=pytest.mark.long,
        ),
        pytest.param(*(1, 1, lambda: time.sleep(60), "timeout", "rank 1"), marks=pytest.mark.long),
    ],
    ids=["raises", "killed", "hangs"],
)
def test_a_faulty_arm_is_named_and_the_others_race(
    data, tmp_path, faulty, rank, at, fault, outcome, detail
):
    faulty(STRATEGIES["manual"], on_rank(rank, at, fault))
    found = raced(plan(data), tmp_path)
    [failed] = found.failures
    assert (failed.run, failed.outcome, failed.source) == ("manual", outcome, "round 1")
    assert detail in failed.detail
    assert "\n" not in failed.detail
    assert [run.run for run in found.runs] == ["ddp", "int8", NO_COMMUNICATION]
    assert all(len(run.step_ms) == BLOCK for run in found.runs)


@pytest.mark.long
def test_a_diverged_arm_leaves_and_the_others_race_on(data, tmp_path, faulty):
    faulty(STRATEGIES["int8"], poison)
    found = raced(plan(data, blocks=2), tmp_path)
    [failed] = found.failures
    assert (failed.run, failed.outcome) == ("int8", "diverged")
    assert failed.detail == "its gradients are not finite"
    steps = [(run.run, len(run.step_ms)) for run in found.runs]
    assert steps == [(name, 2 * BLOCK) for name in ("ddp", "manual", NO_COMMUNICATION)]


@pytest.mark.long
def test_an_incumbent_that_fails_ends_the_race(data, tmp_path, faulty):
    faulty(STRATEGIES["ddp"], on_rank(1, 2, raises))
    found = raced(plan(data), tmp_path)
    [failed] = found.failures
    assert (failed.run, failed.outcome) == ("ddp", "crash")
    assert failed.detail == "rank 1: ArithmeticError: wrong on purpose"
    assert found.reason == "the incumbent failed"
    assert found.runs == []


def test_without_challengers_there_is_no_race(data, tmp_path, faulty):
    faulty(STRATEGIES["int8"], on_rank(0, 0, raises))
    found = raced(plan(data, "ddp", "int8"), tmp_path)
    assert found.reason == "every challenger failed"
    assert [(failed.run, failed.outcome) for failed in found.failures] == [("int8", "crash")]
    assert found.runs == []


def test_a_race_without_time_is_no_race(data, tmp_path):
    found = raced(plan(data), tmp_path, limit_s=0.01)
    assert (found.failures, found.runs) == ([], [])
    assert found.reason == "the race failed: not done after 0.01 s: raise agent.trial_timeout_s"


def test_a_strategy_that_cannot_be_built_is_a_crash_of_its_arm(data, tmp_path):
    odd = parse_strategy({"overrides": [{"layers": [7], "param_dtype": "bf16"}]})
    found = raced(replace(plan(data), strategies={**STRATEGIES, "manual": odd}), tmp_path)
    [failed] = found.failures
    assert (failed.run, failed.outcome) == ("manual", "crash")
    assert "layer 7" in failed.detail


def test_ranks_that_others_start_end_the_race_with_the_name_of_the_run(
    data, tmp_path, faulty, monkeypatch
):
    monkeypatch.setattr(blame, "rank_environment", lambda _: SimpleNamespace(rank=1))
    faulty(STRATEGIES["manual"], on_rank(1, 1, refuses))
    with pytest.raises(RunFailed) as failure:
        raced(plan(data), tmp_path)
    assert failure.value.kind == "crash"
    assert failure.value.summary.startswith("manual: ")
    assert "on purpose" in failure.value.summary


def test_what_no_arm_caused_is_raised(data, tmp_path):
    with pytest.raises(UserError, match="tokens"):
        raced(replace(plan(data), data=tmp_path / "nowhere"), tmp_path)

    def look(step_ms: dict[str, list[float]]) -> RaceDecision:
        raise RuntimeError("the rule is wrong")

    with pytest.raises(RunFailed, match="the rule is wrong"):
        raced(plan(data, blocks=2), tmp_path, look)
    assert [*tmp_path.iterdir()] == []
