"""What an experiment takes is said before it runs, as far as it is known."""

import json
from pathlib import Path

import pytest

from shardlab.config.experiment import Params
from shardlab.config.parameters import Parameters
from shardlab.models.shapes import PUBLISHED
from shardlab.predict.announcement import announcement

ROOT = Path(__file__).parents[2]


def quick(*overrides: str) -> Params:
    return Parameters(ROOT / "params/quick.yaml", overrides).complete()


def test_a_first_run_says_what_follows_from_the_parameters() -> None:
    jobs = [("train", None), ("train", None), ("timing", None), ("report", None)]
    assert announcement(quick(), jobs) == [
        "model tiny: 276 k parameters with 512 tokens",
        "4 jobs, 2 training runs, 1 timing",
        "time unknown before a first run",
        "2 trained models: 2.21 MB on disk",
    ]


THEN = "as such jobs took with the parameters of then"


@pytest.mark.parametrize(
    "seconds, time",
    [
        ([300.0, 400.0, 12.0, 8.0], f"about 12 minutes, {THEN}"),
        ([20.0, None, 1.5, None], f"more than 22 s, {THEN}; new: 2 jobs"),
    ],
)
def test_time_is_that_of_such_jobs_before(seconds: list[float | None], time: str) -> None:
    jobs = [("report", took) for took in seconds]
    assert announcement(quick(), jobs) == ["4 jobs", time]


@pytest.mark.parametrize(
    "trained, changes, time",
    [
        (
            None,
            [],
            "time unknown before a first run; up to 2 minutes for each race, or as long as the "
            "start trains with all seeds",
        ),
        (None, ["agent.trial_timeout_s=50"], "time unknown before a first run; up to 25 s for"),
        # a training run of 10 s, and two races
        (10.0, [], f"more than 4 minutes, {THEN}; new: 2 jobs, up to 2 minutes for each race"),
        # of 200 s with each of three seeds
        (200.0, [], f"more than 23 minutes, {THEN}; new: 2 jobs, up to 10 minutes for each race"),
        (200.0, ["agent.trial_timeout_s=50"], f"more than 4 minutes, {THEN}; new: 2 jobs, up to"),
    ],
)
def test_races_that_never_ran_count_with_what_they_may_take(
    trained: float | None, changes: list[str], time: str
) -> None:
    jobs = [("train", trained), ("trial", None), ("trial", None)]
    lines = announcement(quick("seeds=[0, 1, 2]", *changes), jobs)
    assert lines[1] == "3 jobs, 1 training run, 2 races"
    assert lines[2].startswith(time)


@pytest.mark.parametrize(
    "trained, time", [(None, "time unknown before a first run"), (10.0, "more than")]
)
def test_without_a_budget_no_race_is_announced(trained: float | None, time: str) -> None:
    lines = announcement(quick("agent.budget=0"), [("train", trained), ("trial", None)])
    assert lines[1] == "2 jobs, 1 training run"
    assert lines[2].startswith(time)
    assert "race" not in lines[2]


def test_a_configuration_says_how_many_parameters_there_are(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["gpt2"]))
    lines = announcement(quick(f"model={{config: {config}}}"), [("train", None)])
    assert lines[0] == f"model {config}: 124 M parameters"
    assert lines[-1] == "1 trained model: 498 MB on disk"
