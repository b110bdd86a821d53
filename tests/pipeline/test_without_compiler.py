"""Training without compiled kernels uses the PyTorch reference and says so once."""

import shutil
import sys
from pathlib import Path

import pytest

from shardlab.core.files import read_json_lines
from tests.pipeline.workspace import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_the_reference_trains_to_the_same_losses(workspace: Path, tmp_path: Path) -> None:
    events = workspace / "results/train/fsdp2-int8/seed0/events.jsonl"
    compiled = [event["loss"] for event in read_json_lines(events)]
    (workspace / "shardlab/kernels/libshardlab_kernels.so").unlink()
    # or it would be compiled again
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tools / "python").chmod(0o755)
    (tools / "git").symlink_to(str(shutil.which("git")))
    command = ("python", "-m", "shardlab", "train", "--run", "fsdp2-int8")
    said = run(workspace, "env", f"PATH={tools}", *command).stdout
    assert said.count("no compiled kernels") == 1
    assert "using the PyTorch reference" in said
    assert [event["loss"] for event in read_json_lines(events)] == compiled
