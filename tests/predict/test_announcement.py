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
    jobs = {"train": 2, "timing": 1, "report": 1}
    assert announcement(quick(), jobs, [None] * 4) == [
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
    assert announcement(quick(), {"report": 4}, seconds) == ["4 jobs", time]


def test_a_configuration_says_how_many_parameters_there_are(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["gpt2"]))
    lines = announcement(quick(f"model={{config: {config}}}"), {"train": 1}, [None])
    assert lines[0] == f"model {config}: 124 M parameters"
    assert lines[-1] == "1 trained model: 498 MB on disk"
