"""Training without compiled kernels uses the PyTorch reference and says so once."""

from pathlib import Path

import pytest

from shardlab.core.files import read_json_lines
from tests.pipeline.workspace import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_the_reference_trains_to_the_same_losses(workspace: Path) -> None:
    events = workspace / "results/train/fsdp2-int8/seed0/events.jsonl"
    compiled = [event["loss"] for event in read_json_lines(events)]
    (workspace / "shardlab/kernels/libshardlab_kernels.so").unlink()
    said = run(workspace, "python", "-m", "stages.train", "--run", "fsdp2-int8").stdout
    assert said.count("no compiled kernels") == 1
    assert [event["loss"] for event in read_json_lines(events)] == compiled
