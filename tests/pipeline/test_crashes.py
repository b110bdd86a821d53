"""Stages that are killed at random moments; `python -m tests.faults.crashes` does it more often."""

import random
from pathlib import Path

import pytest

from tests.faults.crashes import STAGES, Stage, kill
from tests.pipeline.workspace import set_params

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", STAGES)
def test_killed_stage_leaves_nothing(workspace: Path, tmp_path: Path, name: str) -> None:
    set_params(workspace, train__checkpoint={"every": 2})
    stage = Stage(workspace, name, tmp_path / "scratch")
    # three of the stages have their outputs before they are killed
    assert not kill(stage, name, 1, random.Random([*STAGES].index(name))).faults
